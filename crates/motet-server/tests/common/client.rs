//! A small HTTP client over a plain socket: what a test sends is what goes over the wire, and when it drops the
//! response the connection is closed.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// No answer of a test takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A response whose head has been read.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    socket: BufReader<TcpStream>,
    /// Bytes of the body that were read and not yet taken.
    buffer: Vec<u8>,
    chunked: bool,
    left: usize,
}

/// Sends a request and does not wait for anything.
pub(crate) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &[u8],
) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let length = if method == "POST" { format!("Content-Length: {}\r\n", body.len()) } else { String::new() };
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: motet\r\nConnection: close\r\n{length}{headers}\r\n");
    socket.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
    socket
}

/// Waits for the head of a response.
pub(crate) async fn head(socket: TcpStream) -> Response {
    let mut socket = BufReader::new(socket);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        let read =
            timeout(PATIENCE, socket.read_line(&mut line)).await.expect("no response in time").unwrap();
        assert!(read > 0, "the connection was closed before a response");
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_string()),
        }
    }
    let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
    let split = |line: &String| {
        let (name, value) = line.split_once(": ").unwrap();
        (name.to_ascii_lowercase(), value.to_string())
    };
    let headers: Vec<_> = lines[1..].iter().map(split).collect();
    let mut response = Response { status, headers, socket, buffer: Vec::new(), chunked: false, left: 0 };
    response.chunked = response.header("transfer-encoding") == Some("chunked");
    response.left = response.header("content-length").map_or(0, |length| length.parse().unwrap());
    response
}

/// A GET.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Response {
    head(send(address, "GET", path, "", b"").await).await
}

/// A POST of JSON.
pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    head(send(address, "POST", path, "Content-Type: application/json\r\n", body.to_string().as_bytes()).await)
        .await
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    /// Reads more of the body into the buffer; `false` at its end.
    async fn more(&mut self) -> bool {
        timeout(PATIENCE, self.read_more()).await.expect("no more of the body in time")
    }

    async fn read_more(&mut self) -> bool {
        if self.chunked {
            let mut line = String::new();
            assert!(self.socket.read_line(&mut line).await.unwrap() > 0, "the body broke off");
            self.left = usize::from_str_radix(line.trim_end(), 16).unwrap();
        }
        let start = self.buffer.len();
        self.buffer.resize(start + self.left, 0);
        self.socket.read_exact(&mut self.buffer[start..]).await.unwrap();
        let read = std::mem::take(&mut self.left);
        if self.chunked {
            self.socket.read_line(&mut String::new()).await.unwrap();
        }
        read > 0
    }

    /// The rest of the body.
    pub(crate) async fn bytes(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.buffer)
    }

    /// The rest of the body, which is JSON.
    pub(crate) async fn json(&mut self) -> Value {
        let bytes = self.bytes().await;
        serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| panic!("no JSON: {:?}", String::from_utf8_lossy(&bytes)))
    }

    /// The next line of a stream of events that is not empty; `None` at its end.
    pub(crate) async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                let line = String::from_utf8(line).unwrap();
                match line.trim_end() {
                    "" => continue,
                    line => return Some(line.to_string()),
                }
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// The data of the next event, comments left out; `None` at the end of the stream.
    pub(crate) async fn event(&mut self) -> Option<String> {
        loop {
            let line = self.line().await?;
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.to_string());
            }
            assert!(line.starts_with(':'), "neither event nor comment: {line}");
        }
    }

    /// All events up to `[DONE]`, after which the stream must end.
    pub(crate) async fn events(&mut self) -> Vec<Value> {
        let mut events = Vec::new();
        while let Some(event) = self.event().await {
            if event == "[DONE]" {
                assert_eq!(self.event().await, None, "something after [DONE]");
                return events;
            }
            events.push(serde_json::from_str(&event).unwrap());
        }
        panic!("the stream ended without [DONE] after {events:?}");
    }
}
