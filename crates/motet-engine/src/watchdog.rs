//! The watchdog: a thread that sees to it that steps end.
//!
//! A step that hangs hangs the engine's thread, which has the streams of all that runs; so somebody else must end them.
//! This thread reads the heartbeat that the engine's thread leaves in the queue, and sleeps while there is nothing to
//! run. It must never wait for anything that the engine's thread holds during a step.

use crate::clock::Clock;
use crate::queue::Queue;
use crate::stream::StreamError;
use std::time::Duration;

/// The longest time between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// Watches until the engine's thread has ended, or a step has not within `patience`: then the engine is given up.
pub(crate) fn watch(queue: &Queue, clock: &dyn Clock, patience: Duration) {
    let mut sight = Sight::new(patience);
    while let Some(heartbeat) = queue.next_heartbeat((patience / 16).min(PAUSE)) {
        if sight.look(heartbeat, clock.now()) && queue.stall(heartbeat, &StreamError::Stalled(patience)) {
            return;
        }
    }
}

/// How long the same step has been seen to run.
///
/// Time counts only as far as somebody was awake to see it. When the process was stopped, or its machine, the clock may
/// have gone on but no step could; so of the time between two looks no more than a quarter of the patience counts.
struct Sight {
    patience: Duration,
    /// The last heartbeat that was seen, when it was looked at last, and for how long it was the last.
    heartbeat: Duration,
    looked: Duration,
    seen: Duration,
}

impl Sight {
    fn new(patience: Duration) -> Self {
        Self { patience, heartbeat: Duration::MAX, looked: Duration::ZERO, seen: Duration::ZERO }
    }

    /// Looks at the last heartbeat; whether it has been the last for too long.
    fn look(&mut self, heartbeat: Duration, now: Duration) -> bool {
        if heartbeat != self.heartbeat {
            (self.heartbeat, self.looked, self.seen) = (heartbeat, heartbeat, Duration::ZERO);
        }
        self.seen += now.saturating_sub(self.looked).min(self.patience / 4);
        self.looked = now;
        self.seen >= self.patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// When a step that began at second 5 is given up, if somebody looks in these seconds.
    fn bites(looks: impl IntoIterator<Item = u32>) -> Option<u32> {
        let mut sight = Sight::new(30 * SECOND);
        looks.into_iter().find(|&at| sight.look(5 * SECOND, at * SECOND))
    }

    #[test]
    fn a_step_is_given_up_after_the_patience_and_not_before() {
        assert_eq!(bites(5..100), Some(35));
        assert_eq!(bites(5..35), None);
    }

    #[test]
    fn time_in_which_nobody_could_look_hardly_counts() {
        // The hour from 6 to 3606 counts as seven seconds and a half, beside the one from 5 to 6.
        assert_eq!(bites([5, 6].into_iter().chain(3606..3700)), Some(3606 + 22));
        assert_eq!(bites([3600, 7200, 10_800]), None);
    }

    #[test]
    fn a_heartbeat_begins_the_count_anew() {
        let mut sight = Sight::new(30 * SECOND);
        for at in 0..1000 {
            assert!(!sight.look(at / 30 * 30 * SECOND, at * SECOND), "at {at}");
        }
    }
}
