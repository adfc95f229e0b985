//! `motet chat` from a pipe, with the built-in model.

use std::io::Write;
use std::process::{Command, Stdio};

const OPTIONS: [&str; 6] = ["--temperature", "0", "--max-tokens", "12", "--threads", "1"];

fn motet(arguments: &[&str], input: &str) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_motet"))
        .args(arguments)
        .args(OPTIONS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("motet starts");
    child.stdin.take().expect("its input").write_all(input.as_bytes()).expect("is read");
    let output = child.wait_with_output().expect("motet ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// A first turn, before or after /reset, is what `motet run` answers to the same prompt; a second turn isn't where it asks
/// about the first.
#[test]
fn a_conversation_remembers_until_it_is_reset() {
    let question = "What is a motet?";
    let first = motet(&["run", "--prompt", question], "");
    assert!(first.trim().len() > 1, "{first:?}");
    let both = motet(&["chat"], &format!("{question}\n/reset\n{question}\n"));
    assert_eq!(both, format!("{first}{first}"));
    let (told, asked) = ("My name is Ada.", "What is my name?");
    let (told_first, asked_first) =
        (motet(&["run", "--prompt", told], ""), motet(&["run", "--prompt", asked], ""));
    let turns = motet(&["chat"], &format!("{told}\n{asked}\n/exit\nnever read\n"));
    let second = turns.strip_prefix(&told_first).expect("the first turn is the same");
    assert!(!second.trim().is_empty());
    assert_ne!(second, asked_first);
}
