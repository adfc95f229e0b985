//! How fast attention runs: prefill in multiply-adds per second, decode in bytes of keys and values per second.
//!
//! `cargo run -p motet-cpu --release --example attention_speed [THREADS] [HEAD_DIM] [GROUP]`
#![allow(clippy::print_stdout, reason = "printing is what it is for")]

use std::error::Error;
use std::time::{Duration, Instant};

use motet_cpu::attention::{AttentionShape, attend, scratch_floats};
use motet_cpu::isa::Isa;
use motet_cpu::kv::{HeadRows, KvFormat, KvPages, KvPagesMut, KvPlace, KvShape, Segment, write_segments};
use motet_cpu::pool::{Pool, PoolOptions};
use motet_cpu::shared_rows::RowsMut;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let threads = arguments.next().unwrap_or(Ok(1))?;
    let head_dim = arguments.next().unwrap_or(Ok(128))?;
    let group = arguments.next().unwrap_or(Ok(4))?;
    let isa = Isa::from_env()?;
    let mut pool = Pool::new(PoolOptions { threads, ..PoolOptions::default() })?;
    println!("{isa}, {threads} threads, head_dim {head_dim}, 4 KV heads × {group} heads");
    for format in KvFormat::ALL {
        for (rows, context) in [(512, 2048), (8, 8192), (1, 8192)] {
            measure(isa, &mut pool, format, head_dim, group, rows, context)?;
        }
    }
    Ok(())
}

/// `rows` rows at the end of a context.
fn measure(
    isa: Isa,
    pool: &mut Pool,
    format: KvFormat,
    head_dim: usize,
    group: usize,
    rows: usize,
    context: usize,
) -> Result<(), Box<dyn Error>> {
    let kv = KvShape { format, kv_heads: 4, head_dim_k: head_dim, head_dim_v: head_dim };
    let heads = 4 * group;
    let shape = AttentionShape { kv, heads, scale: 0.1, window: None, first: 0 };
    let place = KvPlace { page_stride: kv.page_bytes(), offset: 0, shape: kv };
    let page_count = context / 64;
    let mut words = vec![0_u64; page_count * kv.page_bytes() / 8];
    let pages: Vec<u32> = (0..page_count as u32).collect();

    let numbers =
        |n: usize| -> Vec<f32> { (0..n).map(|i| (i * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0).collect() };
    let new = numbers(context * 4 * head_dim);
    let new = HeadRows { values: &new, row_stride: 4 * head_dim, head_stride: head_dim };
    let all = Segment { first_position: 0, first_row: 0, rows: context, pages: &pages };
    let start = Instant::now();
    write_segments(
        isa,
        pool,
        &KvPagesMut::new(bytemuck::cast_slice_mut(&mut words), place),
        &[all],
        new,
        new,
    )?;
    let written = start.elapsed();

    let queries = numbers(rows * heads * head_dim);
    let queries = HeadRows { values: &queries, row_stride: heads * head_dim, head_stride: head_dim };
    let mut out = vec![0.0; rows * heads * head_dim];
    let mut scratch = vec![0.0; scratch_floats(&shape, pool.threads(), context)];
    let segment = Segment { first_position: context - rows, first_row: 0, rows, pages: &pages };
    let layer = KvPages::new(bytemuck::cast_slice(&words), place);
    let mut best = Duration::MAX;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        let out = RowsMut::new(&mut out, rows, heads * head_dim, heads * head_dim);
        attend(isa, pool, &shape, &layer, &[segment], queries, out, &mut scratch)?;
        best = best.min(start.elapsed());
    }
    let keys: usize = (context - rows + 1..=context).sum();
    let products = (2 * keys * heads * head_dim) as f64;
    println!(
        "{format:5} {rows:4} rows at {context:5}: {:8.1} µs  {:6.1} GFMA/s  {:6.1} GB/s of pages; writing {:.2} ns a number",
        best.as_secs_f64() * 1e6,
        products / best.as_secs_f64() / 1e9,
        (page_count * kv.page_bytes()) as f64 / best.as_secs_f64() / 1e9,
        written.as_secs_f64() * 1e9 / (context * 8 * head_dim) as f64,
    );
    Ok(())
}
