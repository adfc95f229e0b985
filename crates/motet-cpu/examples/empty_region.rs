//! What an empty parallel region costs, idle and while a stranger keeps a processor busy.
//!
//! `cargo run -p motet-cpu --release --example empty_region [THREADS]`
#![allow(clippy::print_stdout, reason = "printing is what it is for")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use motet_cpu::pool::{Pool, PoolOptions, default_threads, physical_cores, pin_current_thread};

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(default_threads()), |n| n.parse())?;
    for (what, spin) in [("spinning", Duration::from_micros(100)), ("parking at once", Duration::ZERO)] {
        let mut pool = Pool::new(PoolOptions { threads, spin, cores: None })?;
        measure(&format!("{what}, idle"), &mut pool)?;

        let stop = Arc::new(AtomicBool::new(false));
        let stranger = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                if let Some(&core) = physical_cores().last() {
                    pin_current_thread(core);
                }
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        });
        measure(&format!("{what}, last core busy"), &mut pool)?;
        stop.store(true, Ordering::Relaxed);
        stranger.join().map_err(|_| "the stranger panicked")?;
    }
    Ok(())
}

/// Regions of one task per thread that does nothing, and of 16 tasks per thread of about 2 µs each.
fn measure(what: &str, pool: &mut Pool) -> Result<(), Box<dyn Error>> {
    let threads = pool.threads();
    for (name, tasks, pauses) in [("empty", threads, 0), ("16 tasks/thread", 16 * threads, 50)] {
        let mut times = Vec::new();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(500) {
            let start = Instant::now();
            pool.run(tasks, |_, _| (0..pauses).for_each(|_| std::hint::spin_loop()))?;
            times.push(start.elapsed());
        }
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e6;
        println!(
            "{threads} threads, {what:32} {name:16} p50 {:8.2} µs   p90 {:8.2} µs   p99 {:8.2} µs   regions {}",
            at(50),
            at(90),
            at(99),
            times.len()
        );
    }
    Ok(())
}
