//! Files over HTTP: begun downloads go on where they stopped, and what arrives is held against the server's checksum.

use std::path::Path;
use std::time::Duration;

use ureq::http::HeaderMap;
use ureq::{Agent, ResponseExt as _};

use super::part::Part;
use super::{PullError, bar};

/// Downloads `url` to `target`. Where the server tells no sha256 a download starts over: nothing else could tell that
/// the second half belongs to the first.
pub(super) fn pull(url: &str, target: &Path) -> Result<(), PullError> {
    let sha256 = checksum(url)?;
    let mut part = match sha256 {
        Some(_) => Part::resume(target)?,
        None => Part::create(target)?,
    };
    let mut request = agent(10).get(url);
    if part.len() > 0 {
        request = request.header("Range", format!("bytes={}-", part.len()));
    }
    let mut response = request.call().map_err(|e| unreachable(url, e))?;
    let status = response.status().as_u16();
    let range = text(response.headers(), "content-range").map(str::to_owned);
    match status {
        200 => part = Part::create(target)?,
        206 if range.is_some_and(|r| r.starts_with(&format!("bytes {}-", part.len()))) => {}
        // Nothing is left to send: the checksum says whether it is the file.
        416 => return part.finish(target, sha256.as_deref()),
        status => return Err(refusal(&response.get_uri().to_string(), status)),
    }
    let rest = text(response.headers(), "content-length").and_then(|n| n.parse::<u64>().ok());
    let expected = rest.map(|rest| part.len() + rest);
    let bar = bar(expected.unwrap_or(0));
    let outcome = part.append(&mut response.body_mut().as_reader(), |len| bar.set_position(len))?;
    bar.finish_and_clear();
    let reason = match outcome {
        Err(error) => Some(error.to_string()),
        Ok(()) => expected.filter(|e| *e != part.len()).map(|_| "the connection was closed".into()),
    };
    match reason {
        Some(reason) => {
            Err(PullError::Interrupted { got: part.len(), expected: expected.unwrap_or(0), reason })
        }
        None => part.finish(target, sha256.as_deref()),
    }
}

/// The sha256 that the server states. The hub does so in its own answer, before it redirects to its store.
fn checksum(url: &str) -> Result<Option<String>, PullError> {
    let response = agent(0).head(url).call().map_err(|e| unreachable(url, e))?;
    let status = response.status().as_u16();
    if status >= 400 {
        return Err(refusal(url, status));
    }
    let tags = ["x-linked-etag", "etag"].map(|name| text(response.headers(), name));
    Ok(tags.into_iter().flatten().find_map(sha256_of))
}

/// The sha256 in an entity tag, if it is one.
fn sha256_of(tag: &str) -> Option<String> {
    let tag = tag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
    (tag.len() == 64 && tag.chars().all(|c| c.is_ascii_hexdigit())).then_some(tag)
}

fn agent(redirects: u32) -> Agent {
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(redirects)
        .max_redirects_will_error(redirects > 0)
        .timeout_connect(Some(Duration::from_secs(30)))
        .user_agent(concat!("motet/", env!("CARGO_PKG_VERSION")))
        .build()
        .into()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn unreachable(url: &str, error: ureq::Error) -> PullError {
    PullError::Http { url: url.into(), source: Box::new(error) }
}

fn refusal(url: &str, status: u16) -> PullError {
    let url = url.into();
    match status {
        404 => PullError::NotFound { url },
        401 | 403 => PullError::Refused { url, status },
        status => PullError::Status { url, status },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    const BODY: &[u8] = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    /// Its sha256: FIPS 180-2, appendix B.2.
    const SHA256: &str = "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1";

    /// A server that stands in for the hub: tells `tag`, and cuts the first answer after 20 bytes.
    /// Returns its address and the ranges it was asked for.
    fn server(tag: &'static str) -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let ranges = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&ranges);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, tag, &seen);
            }
        });
        (address, ranges)
    }

    fn answer(mut stream: TcpStream, tag: &str, seen: &Mutex<Vec<String>>) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let mut range = String::new();
        for line in lines {
            let line = line?;
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
                range = value.into();
            }
            if line.is_empty() {
                break;
            }
        }
        if request.contains("missing") {
            return stream
                .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
        let from: usize = range.trim_end_matches('-').parse().unwrap_or(0);
        let all = BODY.len();
        let status = match from {
            0 => "200 OK".to_owned(),
            _ => format!("206 Partial Content\r\ncontent-range: bytes {from}-{}/{all}", all - 1),
        };
        let length = all - from;
        write!(
            stream,
            "HTTP/1.1 {status}\r\nx-linked-etag: \"{tag}\"\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        )?;
        if request.starts_with("GET") {
            let first = {
                let mut seen = seen.lock().expect("the list");
                seen.push(range);
                seen.len() == 1
            };
            stream.write_all(if first { &BODY[..20] } else { &BODY[from..] })?;
        }
        Ok(())
    }

    fn target(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("motet-http-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let _ = std::fs::remove_file(Part::path_of(&path));
        path
    }

    #[test]
    fn an_interrupted_download_goes_on_where_it_stopped() {
        let (address, ranges) = server(SHA256);
        let target = target("resume");
        let cut = pull(&format!("{address}/file"), &target);
        assert!(matches!(cut, Err(PullError::Interrupted { got: 20, expected: 56, .. })), "{cut:?}");
        assert!(!target.exists());
        pull(&format!("{address}/file"), &target).expect("the second attempt succeeds");
        assert_eq!(std::fs::read(&target).expect("the file"), BODY);
        assert_eq!(*ranges.lock().expect("the list"), ["", "20-"]);
        let _ = std::fs::remove_file(target);
    }

    #[test]
    fn a_wrong_checksum_is_refused_and_the_file_removed() {
        let (address, _) = server("000000000000000000000000000000000000000000000000000000000000dead");
        let target = target("checksum");
        assert!(pull(&format!("{address}/file"), &target).is_err());
        let second = pull(&format!("{address}/file"), &target);
        assert!(
            matches!(second, Err(PullError::Checksum { ref found, .. }) if found == SHA256),
            "{second:?}"
        );
        assert!(!target.exists() && !Part::path_of(&target).exists());
    }

    #[test]
    fn without_a_checksum_nothing_is_continued() {
        let (address, ranges) = server("not-a-checksum");
        let target = target("over");
        assert!(pull(&format!("{address}/file"), &target).is_err());
        pull(&format!("{address}/file"), &target).expect("the second attempt succeeds");
        assert_eq!(std::fs::read(&target).expect("the file"), BODY);
        assert_eq!(*ranges.lock().expect("the list"), ["", ""]);
        let _ = std::fs::remove_file(target);
    }

    #[test]
    fn a_missing_file_is_said_to_be_missing() {
        let (address, _) = server(SHA256);
        let error = pull(&format!("{address}/missing"), &target("missing")).expect_err("there is none");
        assert!(error.to_string().contains("does not exist (404)"), "{error}");
    }
}
