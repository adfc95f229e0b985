//! Explores the orders of events of the pool that matter: who sleeps, who wakes, who comes late.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p motet-cpu --test pool_loom --release`
//!
//! In the model a thread looks for work once and then goes to sleep, so a lost wake-up is a deadlock, which loom
//! reports; so is a job read while another is written.
#![cfg(loom)]

use loom::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use motet_cpu::pool::{Pool, PoolOptions};

/// Runs `body` under every order of events with at most `preemptions` forced switches.
fn explore(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn pool(threads: usize) -> Pool {
    Pool::new(PoolOptions { threads, spin: Duration::ZERO, cores: None }).expect("the pool starts")
}

/// Runs one region of `tasks` tasks and checks that each ran exactly once, in this region.
fn run_and_check(pool: &mut Pool, tasks: usize) {
    let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, |task, _| {
        runs[task].fetch_add(1, Ordering::Relaxed);
    })
    .unwrap();
    for n in &runs {
        assert_eq!(n.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn a_pool_that_never_ran_can_be_dropped() {
    explore(4, || drop(pool(3)));
}

#[test]
fn one_region() {
    explore(4, || run_and_check(&mut pool(2), 2));
}

#[test]
fn regions_in_a_row_with_a_worker_that_may_come_late() {
    explore(3, || {
        let mut pool = pool(2);
        run_and_check(&mut pool, 2);
        run_and_check(&mut pool, 3);
        run_and_check(&mut pool, 2);
    });
}

#[test]
fn two_workers() {
    explore(2, || {
        let mut pool = pool(3);
        run_and_check(&mut pool, 3);
    });
}

#[test]
fn a_panic_is_returned_and_the_next_region_runs() {
    explore(2, || {
        let mut pool = pool(2);
        let panicking = pool.run(3, |task, _| {
            if task == 1 {
                std::panic::resume_unwind(Box::new("on purpose"));
            }
        });
        let panic = panicking.unwrap_err();
        assert_eq!((panic.task, panic.message.as_str()), (1, "on purpose"));
        run_and_check(&mut pool, 2);
    });
}

#[test]
fn every_task_panics() {
    explore(2, || {
        let mut pool = pool(2);
        let panicking = pool.run(2, |_, _| std::panic::resume_unwind(Box::new("all")));
        assert_eq!(panicking.unwrap_err().message, "all");
        run_and_check(&mut pool, 2);
    });
}
