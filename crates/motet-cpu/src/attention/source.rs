//! Which items there are and who gets what to write: the plan of one attention, and the source that hands it out.
//!
//! Cutting work into items decides about time only. Items with their outputs come from one [`Source`], which takes the
//! output apart; so no two items can write the same place.

use std::ops::Range;

use crate::kv::{PAGE_POSITIONS, Segment};
use crate::shared_rows::RowsMut;

use super::item::{Output, Work};
use super::{AttentionShape, SPLIT_POSITIONS};

/// The two parallel regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    /// Rows, or the records of shared splits.
    Compute,
    /// Rows from the records of shared splits.
    Combine,
}

/// How the segments are cut into items: blocks of rows × KV heads, and for the few segments that would keep one thread
/// busy while the others wait, × splits.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    shape: &'a AttentionShape,
    segments: &'a [Segment<'a>],
    /// Records that there is room for.
    records: usize,
    /// An item that costs more than this is worth sharing.
    long: usize,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        shape: &'a AttentionShape,
        segments: &'a [Segment<'a>],
        threads: usize,
        records: usize,
    ) -> Self {
        let mut plan = Self { shape, segments, records, long: usize::MAX };
        if threads > 1 {
            let cost = |segment| plan.blocks(segment).map(|rows| plan.cost(segment, rows)).sum::<usize>();
            let all: usize = segments.iter().map(cost).sum::<usize>() * shape.kv.kv_heads;
            // With items up to a third of a thread's share, the last to end makes the others wait little.
            plan.long = all / (3 * threads);
        }
        plan
    }

    /// Records that there is room for.
    pub(super) fn records(&self) -> usize {
        self.records
    }

    /// The number of items in a pass.
    pub(super) fn items(&self, pass: Pass) -> usize {
        let mut records = 0;
        let mut items = 0;
        for segment in self.segments {
            match (self.shares(segment, records), pass) {
                (Some(splits), Pass::Compute) => items += splits.len(),
                (Some(_), Pass::Combine) => items += 1,
                (None, Pass::Compute) => items += self.blocks(segment).count(),
                (None, Pass::Combine) => {}
            }
            records += self.records_of(segment, records);
        }
        items * self.shape.kv.kv_heads
    }

    fn blocks(&self, segment: &Segment<'_>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, step) = (segment.rows, self.shape.rows_per_item());
        (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
    }

    /// The positions that some rows of a segment see.
    fn positions(&self, segment: &Segment<'_>, rows: Range<usize>) -> Range<usize> {
        let first = self.shape.keys(segment.first_position + rows.start).start;
        first..segment.first_position + rows.end
    }

    fn splits(&self, segment: &Segment<'_>, rows: Range<usize>) -> Range<usize> {
        let positions = self.positions(segment, rows);
        positions.start / SPLIT_POSITIONS..positions.end.div_ceil(SPLIT_POSITIONS)
    }

    /// Rows × tiles.
    fn cost(&self, segment: &Segment<'_>, rows: Range<usize>) -> usize {
        let tiles = self.positions(segment, rows.clone()).len().div_ceil(PAGE_POSITIONS);
        rows.len() * tiles
    }

    /// The splits of a segment, if they are items of their own; `taken` records belong to segments before it.
    fn shares(&self, segment: &Segment<'_>, taken: usize) -> Option<Range<usize>> {
        let rows = 0..segment.rows;
        if rows.is_empty() || rows.len() > self.shape.rows_per_item() {
            return None;
        }
        let splits = self.splits(segment, rows.clone());
        let fits = rows.len() * self.shape.heads * splits.len() <= self.records - taken;
        (splits.len() > 1 && fits && self.cost(segment, rows) > self.long).then_some(splits)
    }

    /// Records of a segment; `taken` belong to segments before it.
    fn records_of(&self, segment: &Segment<'_>, taken: usize) -> usize {
        self.shares(segment, taken).map_or(0, |splits| segment.rows * self.shape.heads * splits.len())
    }
}

/// The items of a pass in order.
#[derive(Debug, Clone)]
struct Items<'p> {
    plan: &'p Plan<'p>,
    pass: Pass,
    /// Where we are: segment, first row of the block, KV head, and how many splits of it are behind us.
    segment: usize,
    row: usize,
    kv_head: usize,
    splits_done: usize,
    /// Records of the segments before.
    records_before: usize,
}

/// An item, and whether its output is the records of one split.
type Item<'p> = (Work<'p>, bool);

impl<'p> Iterator for Items<'p> {
    type Item = Item<'p>;

    fn next(&mut self) -> Option<Item<'p>> {
        loop {
            let segment = self.plan.segments.get(self.segment)?;
            match (self.plan.shares(segment, self.records_before), self.pass) {
                (Some(splits), Pass::Compute) => return Some((self.next_split(segment, splits), true)),
                (Some(splits), Pass::Combine) => {
                    let per_head = segment.rows * self.plan.shape.group() * splits.len();
                    let first_record = self.records_before + self.kv_head * per_head;
                    return Some((self.next_rows(segment, Some((splits, first_record))), false));
                }
                (None, Pass::Compute) if segment.rows > 0 => {
                    return Some((self.next_rows(segment, None), false));
                }
                (None, _) => self.next_segment(segment),
            }
        }
    }
}

impl<'p> Items<'p> {
    fn next_split(&mut self, segment: &'p Segment<'p>, splits: Range<usize>) -> Work<'p> {
        let split = splits.start + self.splits_done;
        let work = Work {
            segment: *segment,
            rows: 0..segment.rows,
            kv_head: self.kv_head,
            splits: split..split + 1,
            first_record: 0,
        };
        self.splits_done += 1;
        if self.splits_done == splits.len() {
            self.splits_done = 0;
            self.next_head(segment, segment.rows);
        }
        work
    }

    /// The next KV head of the block of rows; `shared` are the splits that are combined and their first record.
    fn next_rows(&mut self, segment: &'p Segment<'p>, shared: Option<(Range<usize>, usize)>) -> Work<'p> {
        let end = (self.row + self.plan.shape.rows_per_item()).min(segment.rows);
        let rows = self.row..end;
        let (splits, first_record) = shared.unwrap_or_else(|| (self.plan.splits(segment, rows.clone()), 0));
        let work = Work { segment: *segment, rows, kv_head: self.kv_head, splits, first_record };
        self.next_head(segment, end);
        work
    }

    /// Behind the last head comes the next block, which begins at row `end`.
    fn next_head(&mut self, segment: &Segment<'_>, end: usize) {
        self.kv_head += 1;
        if self.kv_head == self.plan.shape.kv.kv_heads {
            self.kv_head = 0;
            self.row = end;
            if end == segment.rows {
                self.next_segment(segment);
            }
        }
    }

    fn next_segment(&mut self, segment: &Segment<'_>) {
        self.records_before += self.plan.records_of(segment, self.records_before);
        self.segment += 1;
        self.row = 0;
    }
}

/// Hands out the items of a pass, one by one, each with its part of the output.
#[derive(Debug)]
pub(super) struct Source<'p, 'a> {
    items: Items<'p>,
    /// As many items further as there are threads: what the one who takes an item will probably take next.
    ahead: Items<'p>,
    /// Rows of the output from `out_row` on.
    out: Option<RowsMut<'a>>,
    out_row: usize,
    /// What is left of the columns of a block of rows.
    block: Option<RowsMut<'a>>,
    /// Records that are not handed out.
    records: Option<RowsMut<'a>>,
}

/// What a thread takes.
pub(super) struct Taken<'p, 'a> {
    pub(super) work: Work<'p>,
    pub(super) out: Output<'a>,
    /// What it will probably take next.
    pub(super) then: Option<Work<'p>>,
}

impl<'p, 'a> Source<'p, 'a> {
    pub(super) fn new(
        plan: &'p Plan<'p>,
        pass: Pass,
        threads: usize,
        out: RowsMut<'a>,
        records: Option<RowsMut<'a>>,
    ) -> Self {
        let items = Items { plan, pass, segment: 0, row: 0, kv_head: 0, splits_done: 0, records_before: 0 };
        let mut ahead = items.clone();
        // None where there are not so many items.
        ahead.by_ref().take(threads).for_each(drop);
        Self { items, ahead, out: Some(out), out_row: 0, block: None, records }
    }

    /// The next item, or `None` when all are handed out.
    pub(super) fn next(&mut self) -> Option<Taken<'p, 'a>> {
        let (work, shared) = self.items.next()?;
        let then = self.ahead.next().map(|(work, _)| work);
        let shape = self.items.plan.shape;
        let out = if shared {
            let (mine, rest) = self.records.take()?.split_rows(work.rows.len() * shape.group());
            self.records = Some(rest);
            Output::Split(mine)
        } else {
            if work.kv_head == 0 {
                let first = work.segment.first_row + work.rows.start;
                let (_, from_block) = self.out.take()?.split_rows(first - self.out_row);
                let (block, rest) = from_block.split_rows(work.rows.len());
                self.out_row = first + work.rows.len();
                self.out = Some(rest);
                self.block = Some(block);
            }
            let (mine, rest) = self.block.take()?.split_columns(shape.group() * shape.kv.head_dim_v);
            self.block = Some(rest);
            Output::Rows(mine)
        };
        Some(Taken { work, out, then })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvFormat, KvShape};

    fn shape(kv_heads: usize, group: usize) -> AttentionShape {
        let kv = KvShape { format: KvFormat::F16, kv_heads, head_dim_k: 16, head_dim_v: 2 };
        AttentionShape { kv, heads: kv_heads * group, scale: 1.0, window: None, first: 0 }
    }

    fn segment(first_position: usize, first_row: usize, rows: usize) -> Segment<'static> {
        Segment { first_position, first_row, rows, pages: &[] }
    }

    #[test]
    fn a_long_item_is_shared_by_splits_where_threads_would_wait() {
        let (shape, long) = (shape(2, 3), [segment(4000, 0, 2)]);
        // 8 splits of 2 rows × 6 heads.
        let items = |threads, records| {
            let plan = Plan::new(&shape, &long, threads, records);
            (plan.items(Pass::Compute), plan.items(Pass::Combine))
        };
        assert_eq!(items(4, 96), (2 * 8, 2));
        assert_eq!(items(4, 95), (2, 0), "no room for the records");
        assert_eq!(items(1, 96), (2, 0), "nobody to share with");

        // Beside enough other work nothing is gained.
        let many: Vec<_> = (0..40).map(|row| segment(4000, row, 1)).collect();
        assert_eq!(Plan::new(&shape, &many, 4, 9999).items(Pass::Compute), 80);
    }

    #[test]
    fn every_place_is_written_by_one_item() {
        // A prefill of several blocks, a row to nobody, one long session whose splits are shared, a short one.
        let shape = shape(2, 3);
        let segments = [segment(70, 0, 25), segment(4000, 26, 1), segment(9, 27, 0), segment(0, 27, 3)];
        let plan = Plan::new(&shape, &segments, 8, 60);
        assert_eq!(plan.items(Pass::Compute), 2 * (3 + 8 + 1));
        let (width, record) = (shape.heads * 2, 5);
        let mut out = vec![0.0; 31 * width];
        let mut records = vec![0.0; 60 * record];
        for pass in [Pass::Compute, Pass::Combine] {
            let record_rows = (pass == Pass::Compute).then(|| RowsMut::new(&mut records, 60, record, record));
            let mut source =
                Source::new(&plan, pass, 3, RowsMut::new(&mut out, 31, width, width), record_rows);
            let mut promised = std::collections::VecDeque::new();
            for i in 0..plan.items(pass) {
                let Taken { work, out: output, then } = source.next().expect("as many items as counted");
                let what = |w: &Work<'_>| (w.segment.first_row, w.rows.clone(), w.kv_head, w.splits.clone());
                promised.push_back(then.as_ref().map(what));
                if i >= 3 {
                    assert_eq!(promised.pop_front().flatten(), Some(what(&work)), "three items further");
                }
                let (mut part, shared) = match output {
                    Output::Rows(rows) => (rows, pass == Pass::Combine),
                    Output::Split(records) => (records, true),
                };
                assert_eq!(shared, work.segment.first_position == 4000);
                if shared && pass == Pass::Combine {
                    assert_eq!((work.splits.clone(), work.first_record), (0..8, work.kv_head * 3 * 8));
                } else if shared {
                    assert_eq!(work.splits.len(), 1);
                }
                for row in 0..part.rows() {
                    part.row_mut(row).iter_mut().for_each(|x| *x += 1.0);
                }
            }
            assert!(source.next().is_none());
        }
        for (row, out) in out.chunks_exact(width).enumerate() {
            let expected = if row == 25 || row == 30 { 0.0 } else { 1.0 };
            assert!(out.iter().all(|x| *x == expected), "row {row}");
        }
        let used = 2 * 8 * 3 * record;
        assert!(records[..used].iter().all(|x| *x == 1.0) && records[used..].iter().all(|x| *x == 0.0));
    }
}
