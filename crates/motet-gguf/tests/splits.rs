//! Models on disk: whole, in parts, and in parts that don't belong together.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

use std::path::{Path, PathBuf};

use motet_gguf::{Format, ModelFile, Value, Writer};

/// Writes part `number` of `count`, with one tensor, and returns its path.
fn part(dir: &Path, number: u16, count: u16, tensor: &str) -> PathBuf {
    let path = dir.join(format!("model-{:05}-of-{count:05}.gguf", number + 1));
    let mut file = Writer::new();
    if number == 0 {
        file.put("general.architecture", Value::String("llama")).unwrap();
    }
    file.put("split.no", Value::U16(number)).unwrap();
    file.put("split.count", Value::U16(count)).unwrap();
    file.put("split.tensors.count", Value::I32(count.into())).unwrap();
    file.tensor(tensor, &[4], Format::F32, vec![number as u8; 16]).unwrap();
    std::fs::write(&path, file.to_bytes()).unwrap();
    path
}

/// Asserts that a path is refused with a message that has all these words.
#[track_caller]
fn refused(path: &Path, words: &[&str]) {
    let message = ModelFile::open(path).expect_err("should be refused").to_string();
    assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
}

#[test]
fn the_first_part_opens_all() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> = (0..3).map(|k| part(dir.path(), k, 3, &format!("t{k}"))).collect();
    let model = ModelFile::open(&paths[0]).unwrap();
    assert_eq!(model.metadata().required::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(model.tensors().len(), 3);
    for k in 0..3u8 {
        assert_eq!(model.bytes(model.tensor(&format!("t{k}")).unwrap()), [k; 16]);
    }
    let on_disk: u64 = paths.iter().map(|path| path.metadata().unwrap().len()).sum();
    assert_eq!(model.file_bytes(), on_disk);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let first = part(dir.path(), 0, 2, "t0");
    refused(&first, &["model-00002-of-00002.gguf"]); // it isn't there

    let second = part(dir.path(), 1, 2, "t1");
    assert!(ModelFile::open(&first).is_ok());
    refused(&second, &["part 2 of 2", "open the first part", "model-00001-of-00002.gguf"]);

    let renamed = dir.path().join("renamed.gguf");
    std::fs::copy(&first, &renamed).unwrap();
    refused(&renamed, &["renamed.gguf", "part 1 of 2", "-00001-of-00002.gguf"]);

    part(dir.path(), 1, 2, "t0");
    refused(&first, &["\"t0\" appears twice"]);

    std::fs::copy(&first, &second).unwrap();
    refused(&first, &["model-00002-of-00002.gguf", "says that it is part 1 of 2", "expected part 2 of 2"]);

    let mut file = Writer::new();
    file.put("split.no", Value::U16(1)).unwrap();
    file.put("split.count", Value::U16(2)).unwrap();
    std::fs::write(&second, file.to_bytes()).unwrap();
    refused(&first, &["hold 1 tensors", "split.tensors.count says 2"]);

    let bytes = std::fs::read(&first).unwrap();
    let message = ModelFile::from_vec(bytes).unwrap_err().to_string();
    assert!(message.contains("one of 2 parts"), "{message}");
}

#[test]
fn what_cannot_be_opened_is_told_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    refused(&dir.path().join("absent.gguf"), &["absent.gguf", "No such file"]);
    refused(dir.path(), &[&dir.path().display().to_string(), "not a regular file"]);
    let empty = dir.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    refused(&empty, &["empty.gguf", "not a GGUF file"]);
}

/// Resident bytes of the mappings of one file, from the kernel.
#[cfg(target_os = "linux")]
fn resident(path: &Path) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(&*path.to_string_lossy()));
    let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
#[cfg(target_os = "linux")]
fn released_tensors_leave_memory_and_can_be_read_again() {
    const LEN: usize = 8 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("large.gguf");
    let mut file = Writer::new();
    for (name, byte) in [("first", 1), ("second", 2)] {
        file.tensor(name, &[LEN as u64 / 4], Format::F32, vec![byte; LEN]).unwrap();
    }
    std::fs::write(&path, file.to_bytes()).unwrap();

    let model = ModelFile::open(&path).unwrap();
    let [first, second] = [model.tensor("first").unwrap(), model.tensor("second").unwrap()];
    let sum = |tensor| model.bytes(tensor).iter().map(|byte| u64::from(*byte)).sum::<u64>();
    assert_eq!((sum(first), sum(second)), (LEN as u64, 2 * LEN as u64));
    assert!(resident(&path) >= 2 * LEN as u64);

    model.release(first);
    // About half: the system may map and drop its neighbours in huge pages.
    let left = resident(&path);
    assert!((LEN as u64 / 2..LEN as u64 + (2 << 20)).contains(&left), "{left} bytes are left");
    assert_eq!((sum(first), sum(second)), (LEN as u64, 2 * LEN as u64));
    model.release_all();
    assert_eq!(resident(&path), 0);
    assert_eq!(sum(first), LEN as u64);
}
