//! Accepting connections and speaking HTTP/1.1 on them.
//!
//! A client that closes its connection ends its request: the future or body of the request is dropped, and with it
//! the engine's stream. Nothing here knows what is served.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::select;
use tokio::sync::Semaphore;

use crate::socket::Socket;

/// How long a connection may take to send the head of a request, idle keep-alive included.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// Bytes of a request's head at most, and of what hyper reads and writes at once.
const BUFFER: usize = 16 << 10;

/// Bytes of a connection at most: its buffers for reading and writing, and its task.
pub(crate) const CONNECTION: usize = 2 * BUFFER + (32 << 10);

/// How long to wait when the system refuses another connection (most often: no more file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves connections until the future is dropped; those under way go on and are watched by `graceful`.
/// At most `limit` at once; the rest wait in the listener's backlog.
pub(crate) async fn accept(
    listener: &TcpListener,
    router: &Router,
    graceful: &GracefulShutdown,
    limit: usize,
) {
    let places = Arc::new(Semaphore::new(limit));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((socket, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // A token is a small packet and must not wait for the next one. A failure costs only that.
        let _ = socket.set_nodelay(true);
        let socket = Socket::new(socket);
        let hung_up = socket.hung_up();
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(BUFFER)
            .serve_connection(TokioIo::new(socket), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            select! {
                // An error is the client's leaving or its bad HTTP, which hyper has answered.
                _ = connection => {}
                () = hung_up => {}
            }
            drop(place);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::net::SocketAddr;

    use axum::body::{Body, Bytes};
    use axum::routing::post;
    use futures_util::stream;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::mpsc;
    use tokio::time::timeout;

    use super::*;

    /// Tells when it is dropped.
    struct Told(mpsc::UnboundedSender<()>);

    impl Drop for Told {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    /// A server whose answers never come: `/whole` is silent, `/stream` sends its headers.
    async fn silent_server() -> (SocketAddr, mpsc::UnboundedReceiver<()>) {
        let (sender, dropped) = mpsc::unbounded_channel();
        let other = sender.clone();
        let router = Router::new()
            .route(
                "/whole",
                post(async move |_: Bytes| {
                    let _told = Told(sender.clone());
                    std::future::pending::<()>().await
                }),
            )
            .route(
                "/stream",
                post(async move |_: Bytes| {
                    let told = Told(other.clone());
                    Body::from_stream(stream::poll_fn(move |_| {
                        let _ = &told;
                        std::task::Poll::<Option<Result<Bytes, Infallible>>>::Pending
                    }))
                }),
            );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { accept(&listener, &router, &GracefulShutdown::new(), 16).await });
        (address, dropped)
    }

    async fn ask(address: SocketAddr, path: &str, more: &str) -> TcpStream {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let request = format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{{}}{more}");
        socket.write_all(request.as_bytes()).await.unwrap();
        if path == "/stream" {
            // The headers come although there is nothing to say.
            let mut head = [0; 15];
            socket.read_exact(&mut head).await.unwrap();
            assert_eq!(&head, b"HTTP/1.1 200 OK");
        } else {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        socket
    }

    #[tokio::test]
    async fn a_client_that_leaves_is_noticed_at_once() {
        let (address, mut dropped) = silent_server().await;
        for path in ["/whole", "/stream"] {
            for (what, more) in
                [("alone", ""), ("with a line more", "\r\n"), ("with a request behind", "GET / HTTP/1.1\r\n")]
            {
                let socket = ask(address, path, more).await;
                assert!(dropped.try_recv().is_err(), "{path} {what}: dropped before the client left");
                drop(socket);
                let noticed = timeout(Duration::from_secs(5), dropped.recv()).await;
                assert!(noticed.is_ok(), "{path} {what}: not noticed");
            }
        }
    }
}
