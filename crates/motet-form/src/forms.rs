//! Compiles grammars, a few at once, and remembers those that were used last.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use motet_engine::{ConstraintMaker, Line};
use motet_text::{Grammar, Tokenizer};
use parking_lot::{Condvar, Mutex};

use crate::FormError;
pub(crate) use crate::form::one_line;
use crate::form::{Compiled, Form};
use crate::memory;
use crate::vocabulary;

/// What forms may cost.
#[derive(Debug, Clone)]
pub struct FormLimits {
    /// Bytes of a grammar, its schemas included.
    pub bytes: usize,
    /// Grammars that are remembered, and bytes that they may take together, about.
    pub remembered: (usize, usize),
    /// Grammars that are compiled at once.
    pub compilers: usize,
}

impl Default for FormLimits {
    fn default() -> Self {
        Self { bytes: 1 << 20, remembered: (64, 32 << 20), compilers: 2 }
    }
}

/// All forms of one model. The vocabulary is laid out for them when the first is compiled.
pub struct Forms {
    tokenizer: Arc<Tokenizer>,
    limits: FormLimits,
    factory: OnceLock<Result<ParserFactory, FormError>>,
    compiling: Mutex<usize>,
    compiled: Condvar,
    remembered: Mutex<VecDeque<Remembered>>,
}

struct Remembered {
    grammar: Grammar,
    bytes: usize,
    compiled: Arc<Compiled>,
}

/// Stack for compiling: grammars and schemas nest, and both are read by functions that call themselves.
const STACK: usize = 64 << 20;

impl Forms {
    /// Forms for the answers of a model with this tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>, limits: FormLimits) -> Forms {
        Forms {
            tokenizer,
            limits,
            factory: OnceLock::new(),
            compiling: Mutex::new(0),
            compiled: Condvar::new(),
            remembered: Mutex::new(VecDeque::new()),
        }
    }

    /// What makes an answer keep to a grammar. It compiles on this thread (and waits, if others do), so that must be one
    /// that may block.
    ///
    /// # Errors
    /// What is wrong with the grammar, or that it is too large.
    pub fn compile(&self, grammar: &Grammar) -> Result<ConstraintMaker, FormError> {
        let (found, most) = (grammar.lark.len(), self.limits.bytes);
        if found > most {
            return Err(FormError::TooLarge { what: "bytes of a grammar with its schemas", found, most });
        }
        let compiled = match self.remembered(grammar) {
            Some(compiled) => compiled,
            None => {
                let _turn = self.turn();
                // Somebody else may have compiled it meanwhile.
                match self.remembered(grammar) {
                    Some(compiled) => compiled,
                    None => self.remember(grammar, on_large_stack(|| self.compile_now(grammar))?),
                }
            }
        };
        Ok(Box::new(move || Box::new(Form::new(&compiled))))
    }

    fn compile_now(&self, grammar: &Grammar) -> Result<Compiled, FormError> {
        let factory = self.factory.get_or_init(|| vocabulary::factory(&self.tokenizer, &limits()));
        let factory = factory.as_ref().map_err(Clone::clone)?;
        let top = TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(grammar.lark.clone()));
        let parser = factory.create_parser(top);
        let parser = parser.map_err(|error| FormError::Grammar { what: one_line(&error) })?;
        let (env, tokenizer) = (factory.tok_env().clone(), self.tokenizer.clone());
        Compiled::new(Matcher::new(Ok(parser)), &grammar.begins, env, tokenizer)
    }

    /// A turn at compiling; it ends when it is dropped.
    fn turn(&self) -> Turn<'_> {
        let mut compiling = self.compiling.lock();
        self.compiled.wait_while(&mut compiling, |compiling| *compiling >= self.limits.compilers);
        *compiling += 1;
        Turn(self)
    }

    fn remembered(&self, grammar: &Grammar) -> Option<Arc<Compiled>> {
        let mut all = self.remembered.lock();
        let at = all.iter().position(|remembered| remembered.grammar == *grammar)?;
        let used = all.remove(at)?;
        let compiled = used.compiled.clone();
        all.push_back(used);
        Some(compiled)
    }

    /// Keeps what was compiled, and forgets what was not used for longest.
    fn remember(&self, grammar: &Grammar, compiled: Compiled) -> Arc<Compiled> {
        let compiled = Arc::new(compiled);
        let (entries, most) = self.limits.remembered;
        let bytes = memory::compiled_bytes(grammar);
        let mut all = self.remembered.lock();
        all.push_back(Remembered { grammar: grammar.clone(), bytes, compiled: compiled.clone() });
        let mut sum: usize = all.iter().map(|remembered| remembered.bytes).sum();
        while all.len() > entries || sum > most {
            let Some(forgotten) = all.pop_front() else { break };
            sum -= forgotten.bytes;
        }
        compiled
    }

    /// What forms may take beside what is there, at most, with so many choices that keep to one at once.
    pub fn memory(&self, choices: usize) -> Vec<Line> {
        memory::lines(&self.tokenizer, choices, &self.limits)
    }
}

struct Turn<'a>(&'a Forms);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.compiling.lock() -= 1;
        self.0.compiled.notify_one();
    }
}

/// Runs `compile` where there is stack for it.
pub(crate) fn on_large_stack<T: Send>(
    compile: impl FnOnce() -> Result<T, FormError> + Send,
) -> Result<T, FormError> {
    let failed = |what: String| FormError::Vocabulary { what };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("motet-form".into()).stack_size(STACK);
        let thread = thread.spawn_scoped(scope, compile).map_err(|error| failed(error.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(failed("compiling its grammar failed".to_owned())))
    })
}

/// Limits within which llguidance compiles a grammar and makes a mask: some milliseconds each.
pub(crate) fn limits() -> ParserLimits {
    ParserLimits {
        step_lexer_fuel: 50_000,
        step_max_items: 20_000,
        max_grammar_size: 100_000,
        // Errors would hold the answer's text.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
