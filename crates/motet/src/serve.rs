//! `motet serve`: the HTTP server over an engine.

use std::process;
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Args;
use motet_engine::{Engine, Options};
use motet_server::{Cors, Model as ServedModel, Server, ServerOptions};

use crate::model::{self, Model};
use crate::options::{EngineArgs, ModelArgs};
use crate::output::note;
use crate::{Outcome, bytes};

/// Arguments of `motet serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY`
    #[arg(long, env = "MOTET_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Web pages that may call: loopback, *, none, or a comma-separated list of origins
    #[arg(long, default_value = "loopback", value_name = "ORIGINS")]
    cors: Cors,
    /// Seconds that a step may take, or off; when one takes longer, /health and /livez say so, all answers end with an
    /// error, and the process exits with status 70, to be started anew
    #[arg(long, default_value = "30", value_name = "SECONDS")]
    watchdog: Watchdog,
}

/// How long a step may take; `None`: as long as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Watchdog(Option<Duration>);

impl FromStr for Watchdog {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Watchdog, &'static str> {
        match (text, text.parse::<u32>()) {
            ("off", _) | (_, Ok(0)) => Ok(Watchdog(None)),
            (_, Ok(seconds)) => Ok(Watchdog(Some(Duration::from_secs(seconds.into())))),
            _ => Err("expected a whole number of seconds, or off"),
        }
    }
}

impl Serve {
    pub(crate) fn run(self) -> Outcome {
        let model = Model::open(self.model.model.as_deref())?;
        let device = self.engine.device(self.model.threads())?;
        let plan = model::plan(&model.weights.network, &self.options(), &device)?;
        let Model { name, aliases, tokenizer, template, weights } = model;
        let network = Arc::clone(&weights.network);
        let served = ServedModel { name: name.clone(), aliases, tokenizer, template };
        let options = ServerOptions {
            host: self.host,
            port: self.port,
            api_key: self.api_key.filter(|key| !key.is_empty()),
            cors: self.cors,
            on_drain: Some(|answers| {
                note!("waiting for answers under way ({answers}), at most 30 s; Ctrl-C again ends at once");
            }),
            ..self.engine.server_options()
        };
        let server = Server::bind(options, Arc::new(served))?;
        note!(
            "{} ({}), {} conversations of {} tokens at once, {} in all; http://{}/v1",
            name,
            network.architecture,
            plan.sessions,
            plan.context,
            bytes::show(plan.total),
            server.address(),
        );
        if self.model.model.is_none() {
            note!(
                "This is the built-in demonstration model: it shows the server, not what models can do. A real one: \
                 motet pull smollm2-135m, then motet serve --model FILE"
            );
        }
        server.run(move || {
            let engine = weights.start(plan, device);
            exit_when_stalled(&engine, self.watchdog);
            engine.on_fallen_out(|fallen_out| note!("motet: {fallen_out}"));
            engine.wait_until_loaded().map(|()| engine)
        })?;
        Ok(())
    }

    fn options(&self) -> Options {
        Options { watchdog: self.watchdog.0, ..self.engine.served_options() }
    }
}

/// The status of a server whose engine has stalled: what sysexits.h calls an internal software error.
const STALLED: i32 = 70;

/// How long the last bytes may take on their way to the clients.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Ends the process when the engine's watchdog has bitten. No other thread has to do anything for that.
fn exit_when_stalled(engine: &Engine, watchdog: Watchdog) {
    let after = watchdog.0.unwrap_or_default();
    engine.on_stall(move || {
        // On a thread of its own: nobody may be reading standard error.
        let _ = thread::Builder::new().spawn(move || {
            note!("motet: a step has not ended within {after:?} (--watchdog); exiting with status {STALLED}");
        });
        thread::sleep(LAST_WORDS);
        process::exit(STALLED);
    });
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::error::Error;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpStream;
    use std::process::{Child, Command, Stdio};
    use std::time::Instant;

    use motet_engine::scripted::{Script, Scripted, Sketch};
    use motet_text::Special;

    use super::*;

    #[test]
    fn the_watchdog_takes_seconds_or_is_off() {
        let parsed = |text: &str| text.parse::<Watchdog>().map(|watchdog| watchdog.0);
        assert_eq!(parsed("30"), Ok(Some(Duration::from_secs(30))));
        assert_eq!((parsed("off"), parsed("0")), (Ok(None), Ok(None)));
        for wrong in ["", "-1", "1.5", "30s", "on", "4294967296"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    /// Set for the child of the test below, which is this test again.
    const CHILD: &str = "MOTET_TEST_STALLS";

    const NAME: &str = "serve::tests::a_server_whose_step_hangs_tells_its_clients_and_exits_with_status_70";

    /// Serves a network whose step hangs behind the sixteenth token of a conversation.
    fn serve_a_stall() {
        let Model { name, aliases, tokenizer, template, weights } = Model::open(None).unwrap();
        let word = tokenizer.encode("hello", Special::Parse)[0];
        let answers = move |history: &[u32], _: &_| {
            while history.len() >= 16 {
                thread::park();
            }
            word
        };
        let device = Scripted::new(Script::Answers(Arc::new(answers)));
        let sketch = Sketch { vocab: weights.network.vocab, ..Sketch::default() };
        let watchdog = Watchdog(Some(Duration::from_secs(1)));
        let options = Options { watchdog: watchdog.0, ..Options::default() };
        let served = ServedModel { name, aliases, tokenizer, template };
        let free_port = ServerOptions { port: 0, ..ServerOptions::default() };
        let server = Server::bind(free_port, Arc::new(served)).unwrap();
        note!("http://{}/v1", server.address());
        let started = server.run(move || {
            let engine = device.start(&sketch, &options)?;
            exit_when_stalled(&engine, watchdog);
            engine.wait_until_loaded().map(|()| engine).map_err(Box::<dyn Error + Send + Sync>::from)
        });
        panic!("the server ended by itself: {started:?}");
    }

    /// The child; killed if the test fails.
    struct Stalling(Child);

    impl Drop for Stalling {
        fn drop(&mut self) {
            let _ = self.0.kill().and_then(|()| self.0.wait());
        }
    }

    #[test]
    fn a_server_whose_step_hangs_tells_its_clients_and_exits_with_status_70() {
        if env::var_os(CHILD).is_some() {
            return serve_a_stall();
        }
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .env(CHILD, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = Stalling(child.unwrap());
        let mut said = BufReader::new(child.0.stderr.take().unwrap()).lines().map(Result::unwrap);
        let address = said.find_map(|line| Some(line.strip_prefix("http://")?.replace("/v1", ""))).unwrap();
        let ask = |method: &str, path: &str, body: &str| {
            let mut socket = TcpStream::connect(&address).unwrap();
            let length = body.len();
            write!(
                socket,
                "{method} {path} HTTP/1.1\r\nHost: motet\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
            )
            .unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).unwrap();
            answer
        };
        while !ask("GET", "/health", "").starts_with("HTTP/1.1 200") {}
        let asked = Instant::now();
        // It reads until the server closes the connection.
        let answer = ask("POST", "/v1/completions", r#"{"prompt": "hello", "stream": true}"#);
        let bitten = Instant::now();
        assert!(bitten - asked >= Duration::from_secs(1), "{:?}", bitten - asked);
        let events: Vec<&str> = answer.lines().filter(|line| line.starts_with("data: ")).collect();
        let (last, said_before) = events.split_last().unwrap();
        assert!(last.contains(r#""code":"engine_stalled""#), "{answer}");
        assert!(!said_before.is_empty() && said_before.iter().all(|e| e.contains(r#""text":"#)), "{answer}");
        for path in ["/health", "/livez"] {
            let answer = ask("GET", path, "");
            assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("stalled"), "{answer}");
        }
        assert_eq!(child.0.wait().unwrap().code(), Some(70));
        assert!(bitten.elapsed() < Duration::from_secs(2), "{:?}", bitten.elapsed());
        assert_eq!(
            said.next().unwrap(),
            "motet: a step has not ended within 1s (--watchdog); exiting with status 70"
        );
    }
}
