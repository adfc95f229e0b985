//! A TCP socket with a second handle that tells when the client hangs up.
//!
//! hyper sees the end of a connection when it reads, but it does not read on while bytes behind the request (a stray
//! line, a request sent ahead) wait in its buffer; a client that then leaves would be computed for until its answer
//! is complete. The system tells of the hang-up whether or not anybody reads.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The socket, as hyper reads and writes it.
#[derive(Debug)]
pub(crate) struct Socket(Arc<TcpStream>);

impl Socket {
    /// A socket over a connection.
    pub(crate) fn new(stream: TcpStream) -> Socket {
        Socket(Arc::new(stream))
    }

    /// Returns when the client has closed the connection or its writing side of it (which a client that waits for an
    /// answer does not do). Where the system has no such event, never: hyper's own reading has to do.
    pub(crate) fn hung_up(&self) -> impl Future<Output = ()> + Send + 'static {
        let stream = self.0.clone();
        async move {
            // Of a socket that is registered for reading, this interest sees the peer's end and urgent data (which
            // nobody sends), and leaves alone what is there to be read.
            #[cfg(target_os = "linux")]
            let _ = stream.ready(tokio::io::Interest::PRIORITY).await;
            #[cfg(not(target_os = "linux"))]
            let () = { std::future::pending().await };
            drop(stream);
        }
    }

    /// Tries to write until it would block, then waits until it would not.
    fn write_when_ready(
        &self,
        context: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(context))?;
            match write(&self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(context))?;
            match self.0.try_read(buffer.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    buffer.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write_when_ready(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write_when_ready(context, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Nothing: the connection closes when the last handle is dropped, which is right after.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
