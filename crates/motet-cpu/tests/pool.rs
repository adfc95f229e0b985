//! The pool runs every task exactly once, on any number of threads, and survives what tasks do to it.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use motet_cpu::pool::{Pool, PoolError, PoolOptions, WorkerPanic, default_threads, physical_cores};

fn pool(threads: usize, spin: Duration) -> Pool {
    Pool::new(PoolOptions { threads, spin, cores: None }).expect("the pool starts")
}

#[test]
fn every_task_runs_exactly_once() {
    for threads in [1, 2, 3, 8] {
        for spin in [Duration::ZERO, Duration::from_micros(20)] {
            let mut pool = pool(threads, spin);
            for region in 0..400 {
                let tasks = [0, 1, 2, 3, 7, 64, 301][region % 7];
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |task, worker| {
                    assert!(worker < threads);
                    runs[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                // The region has ended: everything that its tasks wrote is here.
                assert!(
                    runs.iter().all(|n| n.load(Ordering::Relaxed) == 1),
                    "{threads} threads, region {region}"
                );
            }
        }
    }
}

#[test]
fn a_worker_runs_one_task_at_a_time() {
    let threads = 4;
    let mut pool = pool(threads, Duration::from_micros(5));
    let busy: Vec<AtomicBool> = (0..threads).map(|_| AtomicBool::new(false)).collect();
    for _ in 0..200 {
        pool.run(50, |_, worker| {
            assert!(!busy[worker].swap(true, Ordering::SeqCst), "worker {worker} is in two tasks at once");
            std::hint::spin_loop();
            busy[worker].store(false, Ordering::SeqCst);
        })
        .unwrap();
    }
}

#[test]
fn workers_take_part_after_a_sleep() {
    let mut pool = pool(2, Duration::ZERO);
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(2));
        let seen = Mutex::new(HashSet::new());
        // The second task can only end when the first has begun, and the other way round: two threads are needed.
        let arrived = AtomicUsize::new(0);
        pool.run(2, |_, worker| {
            seen.lock().unwrap().insert(worker);
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        })
        .unwrap();
        assert_eq!(seen.into_inner().unwrap(), HashSet::from([0, 1]));
    }
}

#[test]
fn a_worker_that_never_comes_is_not_waited_for() {
    let mut pool = pool(2, Duration::ZERO);
    let release = AtomicBool::new(false);
    // The worker is kept in task 1 until the caller has run all the others by itself.
    let by_caller = AtomicUsize::new(0);
    pool.run(100, |_, worker| {
        if worker == 0 {
            std::thread::sleep(Duration::from_micros(20));
            if by_caller.fetch_add(1, Ordering::SeqCst) + 1 >= 98 {
                release.store(true, Ordering::SeqCst);
            }
        } else {
            while !release.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    })
    .unwrap();
    assert!(by_caller.into_inner() >= 98);
}

#[test]
fn a_panic_is_the_regions_error_and_the_pool_goes_on() {
    for threads in [1, 2, 4] {
        let mut pool = pool(threads, Duration::from_micros(20));
        for round in 0..20 {
            let failed = pool.run(64, |task, _| assert!(task != 40, "task forty, round {round}"));
            let WorkerPanic { task, worker, message } = failed.unwrap_err();
            assert_eq!(task, 40);
            assert!(worker < threads);
            assert_eq!(message, format!("task forty, round {round}"));

            let sum = AtomicUsize::new(0);
            pool.run(64, |task, _| {
                sum.fetch_add(task, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(sum.into_inner(), 64 * 63 / 2);
        }
    }
}

#[test]
fn every_task_may_panic() {
    let mut pool = pool(3, Duration::from_micros(20));
    let failed = pool.run(30, |_, _| std::panic::panic_any(7_u8)).unwrap_err();
    assert_eq!(failed.message, "a panic without a message");
    pool.run(30, |_, _| ()).unwrap();
}

#[test]
fn the_caller_may_change_threads() {
    let mut pool = pool(2, Duration::ZERO);
    for _ in 0..10 {
        pool = std::thread::spawn(move || {
            let sum = AtomicUsize::new(0);
            pool.run(10, |task, _| {
                std::thread::sleep(Duration::from_micros(50));
                sum.fetch_add(task, Ordering::Relaxed);
            })
            .unwrap();
            assert_eq!(sum.into_inner(), 45);
            pool
        })
        .join()
        .unwrap();
    }
}

#[test]
fn bad_options_are_refused() {
    let no_threads = Pool::new(PoolOptions { threads: 0, ..PoolOptions::default() });
    assert!(matches!(no_threads, Err(PoolError::NoThreads)));
    let no_cores = Pool::new(PoolOptions { threads: 2, cores: Some(vec![]), ..PoolOptions::default() });
    assert!(matches!(no_cores, Err(PoolError::NoCores)));
}

#[test]
fn the_default_is_within_what_the_system_grants() {
    let granted = std::thread::available_parallelism().unwrap().get();
    assert!((1..=granted).contains(&default_threads()));
    let cores = physical_cores();
    assert!(cores.is_sorted());
    // Pinned threads compute all the same.
    if !cores.is_empty() {
        let mut pool =
            Pool::new(PoolOptions { threads: 3, cores: Some(cores), ..PoolOptions::default() }).unwrap();
        let sum = AtomicUsize::new(0);
        pool.run(100, |task, _| {
            sum.fetch_add(task, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(sum.into_inner(), 4950);
    }
}
