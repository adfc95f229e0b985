//! `limits BYTES THREADS`: what this machine can do at most, as one line of JSON.
//!
//! `read`: bytes per second when every thread reads its part of one buffer of `BYTES` again and again and does nothing
//! else. `dot`: integer operations per second (a multiply-add counts as two) of the widest u8 × i8 dot product that
//! this CPU has in vector registers, from registers only. Matrix extensions such as AMX are not counted.

mod dot;
mod read;

use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Each limit is measured so many times; the median counts.
const REPETITIONS: usize = 7;
/// A repetition takes at least about this long.
const LEAST: Duration = Duration::from_millis(40);

fn main() -> ExitCode {
    let numbers: Vec<usize> = std::env::args().skip(1).map_while(|a| a.parse().ok()).collect();
    let [bytes @ 1..=usize::MAX, threads @ 1..=4096] = numbers[..] else {
        eprintln!("usage: limits BYTES THREADS");
        return ExitCode::FAILURE;
    };
    let buffer = read::Buffer::new(bytes);
    let read = rate(threads, |thread| {
        std::hint::black_box(read::sum(buffer.part(thread, threads)));
        buffer.part(thread, threads).len() as f64 * size_of::<read::Line>() as f64
    });
    let kernel = dot::Kernel::best();
    let dot = rate(threads, |_| kernel.run());
    println!(
        "{{\"bytes\": {bytes}, \"threads\": {threads}, \"isa\": \"{}\", \"read\": {read:.0}, \"dot\": {dot:.0}}}",
        kernel.name()
    );
    ExitCode::SUCCESS
}

/// Work per second of all threads together; `work` does a piece of it and says how much it was.
fn rate(threads: usize, work: impl Fn(usize) -> f64 + Sync) -> f64 {
    // How often the piece fits into a repetition; the first run warms up.
    work(0);
    let begun = Instant::now();
    work(0);
    let pieces = (LEAST.as_secs_f64() / begun.elapsed().as_secs_f64().max(1e-9)).ceil() as usize;
    let barrier = Barrier::new(threads);
    // When a thread began and ended each repetition, and what it did.
    let repetitions = |thread: usize| -> Vec<(Instant, Instant, f64)> {
        let repetition = |_| {
            barrier.wait();
            let begun = Instant::now();
            let done = (0..pieces).map(|_| work(thread)).sum();
            (begun, Instant::now(), done)
        };
        (0..REPETITIONS).map(repetition).collect()
    };
    let threads: Vec<_> = std::thread::scope(|scope| {
        let repetitions = &repetitions;
        let running: Vec<_> = (0..threads).map(|t| scope.spawn(move || repetitions(t))).collect();
        running.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    let mut rates: Vec<f64> = (0..REPETITIONS)
        .map(|r| {
            // From the first thread's beginning to the last one's end: a thread that had to wait for a core counts.
            let begun = threads.iter().map(|t| t[r].0).min().expect("there is a thread");
            let ended = threads.iter().map(|t| t[r].1).max().expect("there is a thread");
            threads.iter().map(|t| t[r].2).sum::<f64>() / (ended - begun).as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[REPETITIONS / 2]
}
