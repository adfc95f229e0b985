//! An engine whose answers a test can write down: a prompt says between brackets what to answer.

use std::sync::Arc;
use std::time::Duration;

use motet_engine::scripted::{Control, Pace, Script, Scripted, Sketch};
use motet_engine::{Engine, Options};

use super::vocabulary::{END, VOCAB};

/// What is answered to a prompt without brackets, over and over.
pub(crate) const ENDLESS: &[u8] = b"abcdefghij";

/// Options of an engine: 4 conversations of 1024 positions, 8 more may wait.
pub(crate) fn engine_options() -> Options {
    Options { sessions: 4, context: Some(1024), queue: 8, ..Options::default() }
}

/// An engine that answers by the script, in no time; and what makes it stumble.
pub(crate) fn scripted(options: &Options) -> (Engine, Arc<Control>) {
    paced(options, Pace::None)
}

/// The same, with steps that take a time.
pub(crate) fn slow(options: &Options, step: Duration) -> (Engine, Arc<Control>) {
    paced(options, Pace::Real(Arc::new(move |_| step)))
}

fn paced(options: &Options, pace: Pace) -> (Engine, Arc<Control>) {
    let answers = Script::Answers(Arc::new(|history, sampling| next(history, sampling.choice)));
    let device = Scripted { pace, ..Scripted::new(answers) };
    let sketch = Sketch { vocab: VOCAB, context: 8192, ..Sketch::default() };
    let engine = device.start(&sketch, options).unwrap();
    engine.wait_until_loaded().unwrap();
    (engine, device.control)
}

/// The next token: of what stands between the first `[` and `]` of the last message, with `#` for the number of the
/// choice; then the end. A prompt's answer begins behind the template's last words, or behind `>` without a template.
fn next(history: &[u32], choice: u32) -> u32 {
    let (prompt, answer) = history.split_at(begin_of_answer(history));
    let find = |token: u8, from: usize| {
        prompt[from..].iter().position(|&other| other == u32::from(token)).map(|at| from + at)
    };
    let bracketed = find(b'[', 0).and_then(|open| Some(&prompt[open + 1..find(b']', open)?]));
    match bracketed.map(|script| script.get(answer.len())) {
        None => u32::from(ENDLESS[answer.len() % ENDLESS.len()]),
        Some(None) => END,
        Some(Some(&token)) if token == u32::from(b'#') => u32::from(b'0') + choice,
        Some(Some(&token)) => token,
    }
}

/// `<|im_start|>assistant\n`, with or without `<think>\n`; or `>`.
fn begin_of_answer(history: &[u32]) -> usize {
    const START: u32 = 256;
    const THINK: [u32; 2] = [258, 10];
    if let Some(start) = history.iter().rposition(|&token| token == START) {
        let begin = (start + 1 + "assistant\n".len()).min(history.len());
        return if history[begin..].starts_with(&THINK) { begin + 2 } else { begin };
    }
    let sign = history.iter().position(|&token| token == u32::from(b'>'));
    sign.map_or(history.len(), |at| at + 1)
}

/// Holds the engine's steps until it is dropped.
pub(crate) struct Held(Arc<Control>);

/// The next step, and all after it, wait.
pub(crate) fn hold(control: &Arc<Control>) -> Held {
    control.hold();
    Held(control.clone())
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.resume();
    }
}
