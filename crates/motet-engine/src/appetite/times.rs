//! How long something takes, by a count: what is expected, of what was measured between delays.

/// What is expected follows what the last two measurements agree on by this share, and gets so much longer at most: delays
/// come from anywhere, and nothing is done in less time than it takes.
const FOLLOWED: f64 = 0.3;
const LONGER: f64 = 1.02;

/// Of so many first measurements the least counts; before there are so many, none does.
const FEW: u32 = 3;

/// Times by a count.
#[derive(Debug, Clone)]
pub(super) struct Times {
    measured: Vec<Measured>,
    /// Seconds that are expected, everywhere.
    expected: Vec<f64>,
    /// The greatest count that is known.
    pub(super) known: usize,
}

/// What was measured at one count.
#[derive(Debug, Clone, Copy, Default)]
struct Measured {
    seconds: f64,
    times: u32,
    /// The last measurement.
    last: f64,
}

impl Times {
    /// For counts up to `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { measured: vec![Measured::default(); most + 1], expected: vec![0.0; most + 1], known: 0 }
    }

    /// It took so long for so many.
    pub(super) fn measure(&mut self, count: usize, took: f64) {
        let Some(Measured { seconds, times, last }) = self.measured.get_mut(count) else { return };
        *seconds = match *times {
            0 => took,
            1..FEW => seconds.min(took),
            _ => {
                let agreed = seconds.clamp(took.min(*last), took.max(*last));
                (*seconds + FOLLOWED * (agreed - *seconds)).min(LONGER * *seconds)
            }
        };
        (*times, *last) = (times.saturating_add(1), took);
        self.fill();
    }

    /// More rows never take less time, and by the row never more. What is not known is taken to be as little as it can
    /// be.
    fn fill(&mut self) {
        let mut above = f64::INFINITY;
        for (expected, measured) in self.expected.iter_mut().zip(&self.measured).rev() {
            above = if measured.times > 0 { above.min(measured.seconds) } else { above };
            *expected = above;
        }
        let (mut at_below, mut below) = (0, 0.0);
        for at in 1..self.measured.len() {
            if self.is_known(at) {
                let own = f64::max(self.expected[at], below);
                for between in at_below + 1..at {
                    self.expected[between] = f64::max(own * between as f64 / at as f64, below);
                }
                (at_below, below) = (at, own);
                self.known = at;
            }
            self.expected[at] = below;
        }
    }

    /// Whether it was measured often enough to be believed.
    pub(super) fn is_known(&self, count: usize) -> bool {
        self.measured.get(count).is_some_and(|measured| measured.times >= FEW)
    }

    /// Seconds; 0 before anything was measured.
    pub(super) fn of(&self, count: usize) -> f64 {
        self.expected[count.min(self.expected.len() - 1)]
    }
}
