//! Any body to a server over a scripted engine: an answer that is complete, or an error in OpenAI's shape.
//!
//! The first byte chooses the path; the rest is the body.

#![no_main]

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use motet_engine::Options;
use motet_engine::scripted::{Script, Scripted, Sketch};
use motet_server::{Model, Server, ServerOptions, Stop};
use motet_text::ChatTemplate;
use serde_json::Value;

#[path = "../../crates/motet-server/tests/common/vocabulary.rs"]
mod vocabulary;

/// A server that runs as long as the process.
static ADDRESS: LazyLock<SocketAddr> = LazyLock::new(|| {
    let sketch = Sketch { vocab: vocabulary::VOCAB, context: 256, ..Sketch::default() };
    let options = Options { context: Some(256), ..Options::default() };
    let script = Script::Random { end: Some(vocabulary::END), mean: 8 };
    let engine = Scripted::new(script).start(&sketch, &options).expect("an engine");
    engine.wait_until_loaded().expect("that loads");
    let model = Model {
        name: "tiny".into(),
        aliases: Vec::new(),
        tokenizer: vocabulary::bytes(),
        template: ChatTemplate::new(None, None, None).expect("ChatML"),
    };
    let server = Server::bind(ServerOptions { port: 0, ..ServerOptions::default() }, Arc::new(model));
    let server = server.expect("a free port");
    let address = server.address();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let (_sender, stop) = Stop::channel();
        let engine = async { Ok::<_, std::io::Error>(engine) };
        runtime.expect("a runtime").block_on(server.serve(engine, stop)).expect("a server that goes on");
    });
    while !get(address, "/health").is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {}
    address
});

thread_local! {
    static CONNECTION: RefCell<BufReader<TcpStream>> =
        RefCell::new(BufReader::new(TcpStream::connect(*ADDRESS).expect("a connection")));
}

fuzz_target!(|bytes: &[u8]| {
    let [which, body @ ..] = bytes else { return };
    let path = ["/v1/chat/completions", "/v1/completions"][usize::from(which % 2)];
    let (status, answer) = CONNECTION.with_borrow_mut(|connection| post(connection, path, body));
    let shown = String::from_utf8_lossy(&answer);
    assert!([200, 400, 404].contains(&status), "{status} {shown}");
    if status != 200 {
        let error: Value = serde_json::from_slice(&answer).expect("an error is JSON");
        assert!(error["error"]["message"].as_str().is_some_and(|message| message.len() < 2000), "{error}");
    } else if answer.starts_with(b"data: ") {
        assert!(answer.ends_with(b"data: [DONE]\n\n"), "{shown}");
    } else {
        let whole: Value = serde_json::from_slice(&answer).expect("an answer is JSON");
        assert!(whole["choices"][0]["finish_reason"].is_string(), "{whole}");
    }
});

fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut socket = TcpStream::connect(address).ok()?;
    write!(socket, "GET {path} HTTP/1.1\r\nHost: motet\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// Status and body of the answer to a body.
fn post(connection: &mut BufReader<TcpStream>, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
    let head = format!("POST {path} HTTP/1.1\r\nHost: motet\r\nContent-Length: {}\r\n\r\n", body.len());
    connection.get_mut().write_all(&[head.as_bytes(), body].concat()).expect("it is sent");
    let status = line(connection).split(' ').nth(1).expect("a status").parse().expect("a number");
    let mut length = None;
    loop {
        let header = line(connection);
        match header.split_once(": ") {
            Some(("content-length", value)) => length = Some(value.parse().expect("a length")),
            Some(_) => {}
            None => break,
        }
    }
    let mut answer = Vec::new();
    match length {
        Some(length) => take(connection, length, &mut answer),
        None => loop {
            let size = usize::from_str_radix(&line(connection), 16).expect("the size of a chunk");
            take(connection, size, &mut answer);
            line(connection);
            if size == 0 {
                break;
            }
        },
    }
    (status, answer)
}

fn line(connection: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    connection.read_line(&mut line).expect("a line");
    line.trim_end().to_owned()
}

fn take(connection: &mut impl Read, length: usize, answer: &mut Vec<u8>) {
    let start = answer.len();
    answer.resize(start + length, 0);
    connection.read_exact(&mut answer[start..]).expect("the whole answer");
}
