//! `motet serve` as a process of its own.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

/// A served model; killed when dropped.
pub struct Served {
    process: Child,
    address: String,
}

impl Served {
    /// Starts `motet serve` and waits until the model is loaded.
    pub fn start(arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_motet"))
            .args(["serve", "--port", "0"])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(process.stderr.take().unwrap());
        said.read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_string();
        // Whatever else it says must not fill the pipe.
        thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        let served = Self { process, address };
        while !served.request("GET", "/health", None).starts_with("HTTP/1.1 200") {
            thread::sleep(Duration::from_millis(20));
        }
        served
    }

    /// The whole answer to a request, headers and body.
    pub fn request(&self, method: &str, path: &str, body: Option<&Value>) -> String {
        let body = body.map_or(String::new(), Value::to_string);
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: motet\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// A line of /proc/PID/status, in bytes.
    pub fn memory(&self, key: &str) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find(|l| l.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill().and_then(|()| self.process.wait());
    }
}
