//! The program used wrongly: every mistake ends with a status that says so and one clear sentence, and loses nothing.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test stops where something is missing")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn motet(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_motet")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// The one sentence with which a command ends.
#[track_caller]
fn refusal(arguments: &[&str]) -> String {
    let out = motet(arguments);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    said.trim_end().strip_prefix("motet: ").unwrap_or_else(|| panic!("{arguments:?}: {said}")).to_owned()
}

/// A folder of its own for a test.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn built_in() -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/motet-demo.gguf")).unwrap()
}

/// The built-in model with some bytes in place of others of the same length.
fn with(from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut model = built_in();
    let at = model.windows(from.len()).position(|bytes| bytes == from).expect("the bytes are there");
    model[at..at + from.len()].copy_from_slice(to);
    model
}

#[test]
fn stages_that_hold_no_layer_or_not_all_are_refused() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/tiny-llama-f32.gguf");
    for (command, stages, said) in [
        ("verify", "5", "5 stages for 4 layers: expected 1 to 4"),
        ("plan", "64", "64 stages for 4 layers: expected 1 to 4"),
        (
            "serve",
            "0-1,3-3",
            "stage 1 begins with layer 3, expected 2: stages hold all layers, each once, in order",
        ),
        ("plan", "0-1,2-2", "the last stage ends with layer 2, expected 3, the network's last"),
    ] {
        let arguments = [command, "--stages", stages, "--model", model.to_str().unwrap()];
        assert_eq!(refusal(&arguments), format!("stages: {said}"));
    }
}

#[test]
fn a_file_that_is_no_model_is_named_with_what_is_wrong() {
    let folder = folder("wrong-files");
    let model = built_in();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    // A string in a GGUF header is its length in eight bytes, then its bytes.
    let pre = |name: &[u8]| [&[name.len() as u8, 0, 0, 0, 0, 0, 0, 0], name].concat();
    let wrong = [
        (file("a.png", b"\x89PNG\r\n\x1a\n0000"), r#"begins with "\x89PNG", expected to begin with "GGUF""#),
        (file("empty.gguf", b""), r#"is empty, expected to begin with "GGUF""#),
        (file("half.gguf", &model[..model.len() / 2]), "the file may be an incomplete download"),
        (file("header.gguf", &model[..1000]), "the file may be an incomplete download"),
        (
            file("architecture.gguf", &with(&pre(b"qwen35"), &pre(b"qwen99"))),
            r#"architecture "qwen99" is not"#,
        ),
        (folder.clone(), "not a regular file"),
        (folder.join("nothing.gguf"), "is neither a file nor the name of a pulled model"),
    ];
    for (path, what) in &wrong {
        let path = path.to_str().unwrap();
        let commands: [&[&str]; 5] = [
            &["inspect", path],
            &["plan", "--model", path],
            &["run", "--model", path, "--prompt", "hi"],
            &["serve", "--port", "0", "--model", path],
            &["bench", "--model", path],
        ];
        for command in commands {
            let said = refusal(command);
            // The cause is told, and told once.
            assert_eq!(said.matches(what).count(), 1, "{command:?}: {said}");
        }
    }
}

#[test]
fn a_model_that_could_be_pulled_is_told_from_one_that_could_not() {
    let home = folder("home");
    let said = |name: &str| {
        let out = Command::new(env!("CARGO_BIN_EXE_motet"))
            .args(["serve", "--model", name])
            .env_remove("XDG_DATA_HOME")
            .env("HOME", &home)
            .output()
            .unwrap();
        assert_eq!(out.status.code(), Some(1));
        String::from_utf8(out.stderr).unwrap()
    };
    let known = said("smollm2-135m");
    assert!(known.ends_with("is not on this machine yet; motet pull smollm2-135m fetches it\n"), "{known}");
    assert!(said("smallm2-135m").contains("motet pull --list shows names"));
}

#[cfg(unix)]
#[test]
fn a_pipe_is_no_model_and_nobody_waits_for_it() {
    let pipe = folder("pipe").join("pipe.gguf");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    assert!(refusal(&["inspect", pipe.to_str().unwrap()]).ends_with("not a regular file"));
}

/// What is known of a file is printed before the reason why it can't be used.
#[test]
fn inspect_says_that_the_text_side_is_unusable() {
    let path = folder("pre").join("model.gguf");
    let name = |text: &[u8]| {
        [&b"tokenizer.ggml.pre\x08\0\0\0"[..], &[text.len() as u8, 0, 0, 0, 0, 0, 0, 0], text].concat()
    };
    fs::write(&path, with(&name(b"qwen2"), &name(b"qwenX"))).unwrap();
    let path = path.to_str().unwrap();
    let out = motet(&["inspect", path]);
    assert!(String::from_utf8_lossy(&out.stdout).starts_with("architecture    qwen35"));
    assert!(
        refusal(&["inspect", path]).starts_with("pre-tokenizer 'qwenX' is not supported; supported are ")
    );
    assert!(refusal(&["plan", "--model", path]).starts_with("pre-tokenizer 'qwenX' is not supported"));
}

/// Starts to serve with so much memory; whether it could, and whether it answers.
fn serves(memory: u64) -> bool {
    let mut server = Command::new(env!("CARGO_BIN_EXE_motet"))
        .args(["serve", "--port", "0", "--sessions", "2", "--ctx", "512", "--memory", &memory.to_string()])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    let Some(address) = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()) else {
        assert!(line.contains("the least that would do is"), "{line}");
        assert_eq!(server.wait().unwrap().code(), Some(1));
        return false;
    };
    let body = r#"{"prompt": "hello", "max_tokens": 500, "ignore_eos": true}"#;
    // It listens before its weights are there.
    let answer = loop {
        use std::io::Write;
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        write!(
            socket,
            "POST /v1/completions HTTP/1.1\r\nHost: motet\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        if !answer.contains("still loading") {
            break answer;
        }
    };
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(answer.contains("\"finish_reason\":\"length\""), "{answer}");
    true
}

#[test]
fn the_smallest_memory_that_is_named_does_and_a_byte_less_does_not() {
    let said = refusal(&["serve", "--sessions", "2", "--ctx", "512", "--memory", "1000"]);
    let least = said.split("the least that would do is ").nth(1).unwrap_or_else(|| panic!("{said}"));
    let least: u64 = least.split(' ').next().unwrap().parse().unwrap();
    assert!(serves(least));
    assert!(!serves(least - 1));
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    for (option, value) in [
        ("--sessions", "0"),
        ("--sessions", "-1"),
        ("--threads", "0"),
        ("--threads", "10000"),
        ("--kv", "foo"),
        ("--memory", "12banana"),
        ("--step-ms", "0"),
    ] {
        let out = motet(&["plan", option, value]);
        let said = String::from_utf8(out.stderr).unwrap();
        // clap's own status for a command line that is wrong.
        assert_eq!(out.status.code(), Some(2), "{option} {value}: {said}");
        assert!(said.starts_with(&format!("error: invalid value '{value}' for '{option}")), "{said}");
    }
    for ctx in ["0", "9999999"] {
        assert!(
            refusal(&["plan", "--ctx", ctx]).starts_with(&format!("ctx cannot be {ctx}; expected 1 to 2048"))
        );
    }
    assert!(
        refusal(&["run", "--prompt", "hi", "--temperature", "-1"])
            .starts_with("temperature: -1 is not between")
    );
    let long = "word ".repeat(5000);
    assert!(refusal(&["run", "--prompt", &long]).contains("but the context holds 2048"));
}

#[test]
fn a_host_that_is_none_is_refused_with_what_would_do() {
    for host in ["127.0.0.1:8080", "192.0.2.1"] {
        let said = refusal(&["serve", "--port", "0", "--host", host]);
        assert!(said.starts_with(&format!("cannot listen on host {host}, port 0: ")), "{said}");
        assert!(said.ends_with("--host takes an address of this machine or a name of it"), "{said}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert!(
        refusal(&["serve", "--port", &port]).starts_with(&format!("port {port} on 127.0.0.1 is in use; "))
    );
}

#[test]
fn work_is_not_begun_that_cannot_be_written_down() {
    let folder = folder("imatrix");
    let text = folder.join("text.txt");
    fs::write(&text, "word ".repeat(200)).unwrap();
    let text = text.to_str().unwrap();
    let out = folder.join("none/out.gguf");
    let imatrix = |out: &Path| {
        refusal(&["imatrix", "--file", text, "--output", out.to_str().unwrap(), "--ctx", "9000"])
    };
    // Before the text, which is too short, was looked at.
    assert!(imatrix(&out).contains("none/out.gguf: No such file"), "{}", imatrix(&out));
    assert!(imatrix(&folder).contains("Is a directory"), "{}", imatrix(&folder));
    // What was there is still there after a failure.
    let out = folder.join("out.gguf");
    fs::write(&out, "of yesterday").unwrap();
    assert!(imatrix(&out).contains("lower --ctx"));
    assert_eq!(fs::read_to_string(out).unwrap(), "of yesterday");
}

/// A reader that has seen enough ends a command quietly.
#[test]
fn a_closed_pipe_is_no_failure() {
    for command in [
        &["inspect", "--program"][..],
        &["plan"],
        &["plan", "--json"],
        &["run", "--prompt", "Hello", "--prompt", "Who are you?", "--max-tokens", "8"],
        &["pull", "--list"],
    ] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_motet"))
            .args(command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !said.contains("panicked"), "{command:?}: {said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_motet")).arg("plan").stdout(full).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.starts_with("motet: standard output: No space left on device"), "{said}");
}
