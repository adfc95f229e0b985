//! Attention: the definition written out row by row, softmax in f64, and bits that nothing but the row may change.

use motet_cpu::attention::{AttentionShape, attend, scratch_floats};
use motet_cpu::isa::Isa;
use motet_cpu::kv::{
    ABSENT_PAGE, HeadRows, KvFormat, KvPages, KvPagesMut, KvPart, KvPlace, KvShape, NAN_FILL, Segment,
    write_segments,
};
use motet_cpu::lanes::{Lanes, Scalar};
use motet_cpu::math;
use motet_cpu::pool::{Pool, PoolOptions};
use motet_cpu::shared_rows::RowsMut;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// About normal: mean 0, deviation 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.next() as f32 / 2f32.powi(32)).sum::<f32>() - 6.0
    }

    fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

fn pool(threads: usize) -> Pool {
    Pool::new(PoolOptions { threads, ..PoolOptions::default() }).expect("the pool starts")
}

/// One conversation: what its rows put in.
struct Conversation {
    shape: AttentionShape,
    /// Positions, from `shape.first` on.
    positions: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Conversation {
    fn random(shape: AttentionShape, positions: usize, seed: u64) -> Self {
        let mut random = Random(seed * 2 + 1);
        let kv = shape.kv;
        Self {
            shape,
            positions,
            q: random.normals(positions * shape.heads * kv.head_dim_k),
            k: random.normals(positions * kv.kv_heads * kv.head_dim_k),
            v: random.normals(positions * kv.kv_heads * kv.head_dim_v),
        }
    }

    fn width(&self) -> usize {
        self.shape.heads * self.shape.kv.head_dim_v
    }
}

/// How the same conversation may be run.
#[derive(Clone)]
struct Way {
    isa: Isa,
    threads: usize,
    /// Rows per step.
    chunk: usize,
    /// Order of pages in the pool.
    seed: u64,
    /// Scratch for sharing splits between threads.
    shares_splits: bool,
}

impl Way {
    fn plain() -> Self {
        Self { isa: Isa::Scalar, threads: 1, chunk: usize::MAX, seed: 1, shares_splits: false }
    }
}

/// A pool of pages for some conversations, in which everything unused is NaN.
struct Memory {
    words: Vec<u64>,
    place: KvPlace,
    tables: Vec<Vec<u32>>,
}

impl Memory {
    fn new(conversations: &[Conversation], seed: u64) -> Self {
        let shape = conversations[0].shape.kv;
        // The layer lies somewhere within larger pages.
        let place = KvPlace { page_stride: shape.page_bytes() + 192, offset: 128, shape };
        let needed = |c: &Conversation| (c.shape.first + c.positions).div_ceil(64);
        let pages: usize = conversations.iter().map(needed).sum::<usize>() + 3;
        let mut order: Vec<u32> = (0..pages as u32).collect();
        let mut random = Random(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, random.below(i + 1));
        }
        let tables = conversations.iter().map(|c| order.split_off(order.len() - needed(c))).collect();
        let nan = u64::from_ne_bytes([NAN_FILL; 8]);
        Self { words: vec![nan; pages * place.page_stride / 8], place, tables }
    }

    fn pages(&self) -> KvPages<'_> {
        KvPages::new(bytemuck::cast_slice(&self.words), self.place)
    }
}

/// Runs all conversations side by side, each in chunks, and returns their outputs.
fn run(conversations: &[Conversation], way: &Way) -> Vec<Vec<f32>> {
    run_in(&mut Memory::new(conversations, way.seed), conversations, way)
}

fn run_in(memory: &mut Memory, conversations: &[Conversation], way: &Way) -> Vec<Vec<f32>> {
    let shape = conversations[0].shape;
    let (kv, width) = (shape.kv, conversations[0].width());
    let mut pool = pool(way.threads);
    let mut outputs: Vec<Vec<f32>> = conversations.iter().map(|c| vec![0.0; c.positions * width]).collect();
    let mut done = vec![0; conversations.len()];
    let context = conversations.iter().map(|c| c.positions + shape.first).max().unwrap_or(0);
    let floats = scratch_floats(&shape, way.threads, if way.shares_splits { context } else { 0 });
    let mut scratch = vec![f32::NAN; floats];
    loop {
        let mut segments = Vec::new();
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let mut next_row = 1; // One row that belongs to nobody.
        q.resize(shape.heads * kv.head_dim_k, f32::NAN);
        k.resize(kv.kv_heads * kv.head_dim_k, f32::NAN);
        v.resize(kv.kv_heads * kv.head_dim_v, f32::NAN);
        for (i, c) in conversations.iter().enumerate() {
            let rows = way.chunk.min(c.positions - done[i]);
            if rows == 0 {
                continue;
            }
            let position = shape.first + done[i];
            // Pages that no row to come can see leave the table.
            if let Some(window) = shape.window {
                let gone = (position + 1).saturating_sub(window) / 64;
                memory.tables[i][..gone].fill(ABSENT_PAGE);
            }
            segments.push((i, position, next_row, rows));
            let part = |width: usize| done[i] * width..(done[i] + rows) * width;
            q.extend_from_slice(&c.q[part(shape.heads * kv.head_dim_k)]);
            k.extend_from_slice(&c.k[part(kv.kv_heads * kv.head_dim_k)]);
            v.extend_from_slice(&c.v[part(kv.kv_heads * kv.head_dim_v)]);
            next_row += rows;
        }
        if segments.is_empty() {
            return outputs;
        }
        let tables = memory.tables.clone();
        let steps: Vec<Segment<'_>> = segments
            .iter()
            .map(|&(i, first_position, first_row, rows)| Segment {
                first_position,
                first_row,
                rows,
                pages: &tables[i],
            })
            .collect();
        let heads =
            |values, heads: usize, dim| HeadRows { values, row_stride: heads * dim, head_stride: dim };
        let bytes = bytemuck::cast_slice_mut(&mut memory.words);
        write_segments(
            way.isa,
            &mut pool,
            &KvPagesMut::new(bytes, memory.place),
            &steps,
            heads(&k, kv.kv_heads, kv.head_dim_k),
            heads(&v, kv.kv_heads, kv.head_dim_v),
        )
        .expect("no task panics");
        let mut out = vec![-7.0; next_row * width];
        attend(
            way.isa,
            &mut pool,
            &shape,
            &memory.pages(),
            &steps,
            heads(&q, shape.heads, kv.head_dim_k),
            RowsMut::new(&mut out, next_row, width, width),
            &mut scratch,
        )
        .expect("no task panics");
        assert!(out[..width].iter().all(|x| *x == -7.0), "a row without a segment was written");
        for &(i, _, first_row, rows) in &segments {
            outputs[i][done[i] * width..(done[i] + rows) * width]
                .copy_from_slice(&out[first_row * width..(first_row + rows) * width]);
            done[i] += rows;
        }
    }
}

fn bits(outputs: &[Vec<f32>]) -> Vec<Vec<u32>> {
    outputs.iter().map(|output| output.iter().map(|x| x.to_bits()).collect()).collect()
}

fn exp(x: f32) -> f32 {
    math::exp(Scalar, Scalar.splat(x))[0]
}

/// The definition of the module's documentation, one row and head at a time, on keys and values that were read back.
fn by_definition(
    shape: &AttentionShape,
    position: usize,
    q: &[f32],
    k: &[Vec<f32>],
    v: &[Vec<f32>],
) -> Vec<f32> {
    let start = shape.window.map_or(0, |window| (position + 1).saturating_sub(window)).max(shape.first);
    let (mut total_max, mut total_sum) = (f32::NEG_INFINITY, 0.0);
    let mut total = vec![0.0; v[position].len()];
    for split in start / 512..=position / 512 {
        let (mut m, mut l, mut a) = (f32::NEG_INFINITY, [0.0; 16], vec![0.0; total.len()]);
        for tile in split * 8..split * 8 + 8 {
            let keys = (tile * 64).max(start)..(tile * 64 + 64).min(position + 1);
            if keys.is_empty() {
                continue;
            }
            let score = |j: usize| {
                let dot = q.iter().zip(&k[j]).fold(0.0f32, |sum, (q, k)| q.mul_add(*k, sum));
                dot * shape.scale
            };
            let scores: Vec<f32> = keys.clone().map(score).collect();
            let now = scores.iter().fold(m, |m, s| if *s > m { *s } else { m });
            if now > m {
                let factor = exp(m - now);
                l.iter_mut().chain(&mut a).for_each(|x| *x *= factor);
                m = now;
            }
            for (j, score) in keys.zip(scores) {
                let weight = exp(score - m);
                l[j % 16] += weight;
                a.iter_mut().zip(&v[j]).for_each(|(a, v)| *a = weight.mul_add(*v, *a));
            }
        }
        let l = Scalar.sum(l);
        let now = if m > total_max { m } else { total_max };
        let (keep, add) = (exp(total_max - now), exp(m - now));
        total_sum = l.mul_add(add, total_sum * keep);
        total.iter_mut().zip(a).for_each(|(total, a)| *total = a.mul_add(add, *total * keep));
        total_max = now;
    }
    total.into_iter().map(|x| x / total_sum).collect()
}

/// Softmax attention in f64, and the largest magnitude of the values it averages.
fn by_softmax(
    shape: &AttentionShape,
    position: usize,
    q: &[f32],
    k: &[Vec<f32>],
    v: &[Vec<f32>],
) -> (Vec<f64>, f64) {
    let start = shape.window.map_or(0, |window| (position + 1).saturating_sub(window)).max(shape.first);
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    let scores: Vec<f64> = k[start..=position].iter().map(|k| dot(k) * f64::from(shape.scale)).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; v[position].len()];
    let mut largest = 0f64;
    for (weight, v) in weights.iter().zip(&v[start..=position]) {
        for (out, v) in out.iter_mut().zip(v) {
            *out += weight / sum * f64::from(*v);
            largest = largest.max(f64::from(v.abs()));
        }
    }
    (out, largest)
}

/// Keys or values of one head as they are stored, by position; what was never written is NaN.
fn read_back(
    memory: &Memory,
    conversation: usize,
    positions: usize,
    part: KvPart,
    head: usize,
) -> Vec<Vec<f32>> {
    let pages = memory.pages();
    (0..positions)
        .map(|position| {
            let mut out = vec![0.0; pages.shape().head_dim(part)];
            let page = memory.tables[conversation][position / 64];
            if page == ABSENT_PAGE {
                out.fill(f32::NAN);
            } else {
                pages.read(page, part, head, position % 64, &mut out);
            }
            out
        })
        .collect()
}

fn shape(format: KvFormat, kv_heads: usize, group: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        kv: KvShape { format, kv_heads, head_dim_k: head_dim, head_dim_v: head_dim },
        heads: kv_heads * group,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        first: 0,
    }
}

/// Shapes that differ in everything that chooses a way through the kernels.
fn shapes() -> Vec<(AttentionShape, usize)> {
    use KvFormat::{F16, F32, Q8_0};
    let mut all = vec![
        (shape(F16, 2, 1, 64), 150),
        (shape(F32, 1, 2, 16), 1100),
        (shape(Q8_0, 2, 3, 80), 300),
        (shape(F16, 1, 4, 128), 600),
        (shape(Q8_0, 1, 5, 32), 200),
        (shape(F32, 1, 6, 96), 130),
        (shape(F16, 1, 7, 256), 80),
        (shape(Q8_0, 1, 8, 128), 140),
        (AttentionShape { window: Some(100), ..shape(F16, 2, 2, 32) }, 700),
        (AttentionShape { window: Some(1), first: 1, ..shape(Q8_0, 1, 2, 64) }, 130),
        (AttentionShape { window: Some(600), first: 1, ..shape(F32, 1, 3, 16) }, 1300),
        (AttentionShape { first: 1, ..shape(F16, 1, 2, 48) }, 520),
    ];
    // Keys and values of different widths, neither of them whole lanes.
    let mut odd = shape(Q8_0, 2, 2, 40);
    odd.kv.head_dim_v = 24;
    all.push((odd, 90));
    odd.kv.format = F16;
    odd.kv.head_dim_k = 7;
    all.push((odd, 90));
    all
}

#[test]
fn the_bits_are_those_of_the_definition_and_the_values_those_of_softmax() {
    for (n, (shape, positions)) in shapes().into_iter().enumerate() {
        let c = [Conversation::random(shape, positions, n as u64)];
        // In one step, so that all pages are still there to be read back.
        let mut memory = Memory::new(&c, 5);
        let table = memory.tables.clone();
        let found = &run_in(&mut memory, &c, &Way { isa: Isa::best(), ..Way::plain() })[0];
        memory.tables = table;
        let (c, kv) = (&c[0], shape.kv);
        for head in 0..shape.heads {
            let end = shape.first + positions;
            let k = read_back(&memory, 0, end, KvPart::K, head / (shape.heads / kv.kv_heads));
            let v = read_back(&memory, 0, end, KvPart::V, head / (shape.heads / kv.kv_heads));
            for row in (0..positions).step_by(if positions > 300 { 11 } else { 1 }) {
                let position = shape.first + row;
                let q = &c.q[(row * shape.heads + head) * kv.head_dim_k..][..kv.head_dim_k];
                let found = &found[row * c.width() + head * kv.head_dim_v..][..kv.head_dim_v];
                let defined = by_definition(&shape, position, q, &k, &v);
                let to_bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(to_bits(found), to_bits(&defined), "{shape:?} head {head} position {position}");
                let (softmax, largest) = by_softmax(&shape, position, q, &k, &v);
                for (found, softmax) in found.iter().zip(softmax) {
                    // Scores of magnitude up to about 6 with dot products of up to 256 terms: some 2⁻¹⁹ each.
                    let error = (f64::from(*found) - softmax).abs();
                    assert!(error <= 4e-6 * largest, "{shape:?} position {position}: {found} for {softmax}");
                }
            }
        }
    }
}

#[test]
fn bits_depend_on_the_row_alone() {
    for (n, (shape, positions)) in shapes().into_iter().enumerate() {
        let lengths = [positions, positions / 2 + 1, 1];
        let conversations: Vec<Conversation> = lengths
            .iter()
            .enumerate()
            .map(|(i, &positions)| Conversation::random(shape, positions, (n * 3 + i) as u64))
            .collect();
        let alone: Vec<_> = conversations
            .iter()
            .flat_map(|c| run(std::slice::from_ref(c), &Way { isa: Isa::best(), ..Way::plain() }))
            .collect();
        assert!(alone.iter().flatten().all(|x| x.is_finite()), "{shape:?}");
        let mut ways = vec![
            Way { threads: 2, chunk: 32, seed: 9, shares_splits: true, isa: Isa::best() },
            Way { threads: 3, chunk: 7, seed: 4, shares_splits: true, isa: Isa::best() },
            Way { threads: 2, chunk: 1, seed: 3, shares_splits: true, isa: Isa::best() },
            Way { threads: 1, chunk: 512, seed: 2, shares_splits: false, isa: Isa::best() },
        ];
        ways.extend(Isa::available().into_iter().map(|isa| Way { isa, chunk: 130, ..Way::plain() }));
        ways.extend(Isa::available().into_iter().map(|isa| Way {
            isa,
            chunk: 3,
            threads: 2,
            ..Way::plain()
        }));
        for way in ways {
            let found = run(&conversations, &way);
            assert!(
                bits(&found) == bits(&alone),
                "{shape:?}, {} in chunks of {} on {} threads",
                way.isa,
                way.chunk,
                way.threads
            );
        }
    }
}

#[test]
fn a_late_row_of_a_long_context_shares_its_splits() {
    // One decode row with 5 splits on 4 threads, against the same row as part of one long chunk on one thread.
    let shape = shape(KvFormat::F16, 1, 4, 64);
    let c = [Conversation::random(shape, 2500, 77)];
    let plain = run(&c, &Way { isa: Isa::best(), ..Way::plain() });
    let shared = Way { isa: Isa::best(), threads: 4, chunk: 2, seed: 5, shares_splits: true };
    assert!(bits(&run(&c, &shared)) == bits(&plain));
}

#[test]
fn equal_scores_average_and_one_huge_score_takes_all() {
    let shape = shape(KvFormat::F32, 1, 1, 16);
    let mut c = Conversation::random(shape, 700, 3);
    // All keys equal: the mean of the values so far.
    for k in c.k.chunks_exact_mut(16) {
        k.fill(0.25);
    }
    let conversations = [c];
    for isa in Isa::available() {
        let found = run(&conversations, &Way { isa, ..Way::plain() });
        let mut sums = [0.0f64; 16];
        for (position, v) in conversations[0].v.chunks_exact(16).enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum += f64::from(v[i]);
                let mean = *sum / (position + 1) as f64;
                assert!(
                    (f64::from(found[0][position * 16 + i]) - mean).abs() < 2e-6,
                    "{isa} position {position}"
                );
            }
        }
    }

    // Scores of 0, then one of 1e30 at position 100 and one of −1e30 at 101: from 100 on its value is the output.
    let [mut c] = conversations;
    c.q.fill(0.0);
    c.q.iter_mut().step_by(16).for_each(|q| *q = 1e15);
    c.k.fill(0.0);
    (c.k[100 * 16], c.k[101 * 16]) = (4e15, -4e15);
    let conversations = [c];
    for isa in Isa::available() {
        let found = run(&conversations, &Way { isa, ..Way::plain() });
        for position in 100..700 {
            assert_eq!(
                found[0][position * 16..][..16],
                conversations[0].v[100 * 16..][..16],
                "{isa} {position}"
            );
        }
        let first = &conversations[0].v[..16];
        assert_eq!(found[0][..16], *first, "a row that sees only itself");
    }
}

#[test]
fn a_row_that_looks_where_a_page_is_absent_is_an_error() {
    let shape = shape(KvFormat::F16, 1, 1, 16);
    let place = KvPlace { page_stride: shape.kv.page_bytes(), offset: 0, shape: shape.kv };
    let words = vec![0_u64; shape.kv.page_bytes() / 8];
    let (q, mut out) = (vec![0.0; 16], vec![0.0; 16]);
    let mut scratch = vec![0.0; scratch_floats(&shape, 1, 0)];
    let segment = Segment { first_position: 64, first_row: 0, rows: 1, pages: &[ABSENT_PAGE, 0] };
    let failed = attend(
        Isa::best(),
        &mut pool(1),
        &shape,
        &KvPages::new(bytemuck::cast_slice(&words), place),
        &[segment],
        HeadRows { values: &q, row_stride: 16, head_stride: 16 },
        RowsMut::new(&mut out, 1, 16, 16),
        &mut scratch,
    );
    assert!(failed.unwrap_err().message.contains("left its table"));
}
