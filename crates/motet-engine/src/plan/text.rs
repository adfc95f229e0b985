//! The plan as people read it: a line for each purpose, a column for each stage.

use super::{Plan, StagePlan, bytes};
use std::fmt;

impl Plan {
    /// A column for each stage.
    fn write_stages(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, cells: &dyn Fn(&StagePlan) -> String| {
            write!(f, "  {name:<24}")?;
            self.stages.iter().try_for_each(|stage| write!(f, "{:>14}", cells(stage)))?;
            writeln!(f)
        };
        writeln!(f, "Of it, by stage (what stages share stands with the first):")?;
        row(f, "layers", &|stage| stage.layers.clone())?;
        for (i, line) in self.stages[0].lines.iter().enumerate() {
            if self.stages.iter().any(|stage| stage.lines[i].bytes > 0) {
                row(f, &line.name, &|stage| bytes(stage.lines[i].bytes))?;
            }
        }
        row(f, "in all", &|stage| bytes(stage.total))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} sessions of {} tokens, {} rows a step", self.sessions, self.context, self.rows)?;
        for line in &self.lines {
            writeln!(f, "  {:<38}{:>12}", line.name, bytes(line.bytes))?;
            for part in &line.parts {
                writeln!(f, "    {:<36}{:>12}", part.name, bytes(part.bytes))?;
            }
        }
        writeln!(f, "  {:<38}{:>12}", "in all", bytes(self.total))?;
        if self.stages.len() > 1 {
            self.write_stages(f)?;
        }
        writeln!(f, "Many clients at once may add, at most:")?;
        for line in &self.clients {
            writeln!(f, "  {:<38}{:>12}", line.name, bytes(line.bytes))?;
        }
        writeln!(f, "  {:<38}{:>12}", "in all, at most", bytes(self.most))?;
        writeln!(f, "A further conversation adds {}.", bytes(self.state_per_session))?;
        writeln!(f, "Buffers for each of its own would have added {}.", bytes(self.separate_buffers))?;
        if self.separate_draft_buffers > 0 {
            let added = bytes(self.separate_draft_buffers);
            writeln!(f, "Separate buffers for drafting would have added {added}.")?;
        }
        match self.machine.memory {
            None => writeln!(f, "This machine does not say how much memory it has."),
            Some(m) if self.fits => writeln!(f, "It fits: this machine has {} to spare.", bytes(m)),
            Some(m) => writeln!(
                f,
                "It does not fit: this machine has {} to spare; the least that would do is --memory {} ({}).",
                bytes(m),
                self.smallest_memory,
                bytes(self.smallest_memory)
            ),
        }
    }
}
