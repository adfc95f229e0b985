//! Pages of keys and values: what is written reads back through the format, and nothing else changes.

use motet_cpu::isa::Isa;
use motet_cpu::kv::{
    HeadRows, KvFormat, KvPages, KvPagesMut, KvPart, KvPlace, KvShape, NAN_FILL, Segment, page_bytes,
    write_segments,
};
use motet_cpu::pool::{Pool, PoolOptions};

const EXTREMES: [f32; 12] =
    [0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, -1e9, f32::INFINITY, 1e-7, -5e-8, 1e-20, 2.345_678_9];

fn number(i: usize) -> f32 {
    let hashed = (i as u32).wrapping_mul(2_654_435_761) ^ 0x9e37;
    (hashed >> 8) as f32 / 2f32.powi(23) - 1.0
}

/// What a row of a head must read back as: the formats by their definition, in f64 where it matters.
fn expected(format: KvFormat, row: &[f32]) -> Vec<f32> {
    match format {
        KvFormat::F32 => row.to_vec(),
        KvFormat::F16 => row.iter().map(|x| half(f64::from(*x))).collect(),
        KvFormat::Q8_0 => row
            .chunks(32)
            .flat_map(|block| {
                let amax = block.iter().fold(0f32, |m, x| m.max(x.abs()));
                let d = half(f64::from(amax / 127.0));
                let value = move |x: &f32| match d {
                    0.0 => 0.0,
                    d => (x / d).clamp(-127.0, 127.0).round_ties_even() * d,
                };
                block.iter().map(value)
            })
            .collect(),
    }
}

/// The nearest F16, by its spacing at that magnitude; saturating.
fn half(x: f64) -> f32 {
    if x == 0.0 || x.abs() >= 65504.0 {
        return x.clamp(-65504.0, 65504.0) as f32;
    }
    let spacing = 2f64.powi((x.abs().log2().floor() as i32).max(-14) - 10);
    ((x / spacing).round_ties_even() * spacing).clamp(-65504.0, 65504.0) as f32
}

struct Written {
    shape: KvShape,
    place: KvPlace,
    words: Vec<u64>,
    k: Vec<f32>,
    v: Vec<f32>,
}

const TABLE: [u32; 3] = [4, 0, 2];
const FIRST: usize = 60;
const ROWS: usize = 70;

/// Floats from one row to the next and from one head to the next.
fn strides(dim: usize) -> (usize, usize) {
    (3 * (dim + 2) + 5, dim + 2)
}

fn rows(values: &[f32], dim: usize) -> HeadRows<'_> {
    HeadRows { values, row_stride: strides(dim).0, head_stride: strides(dim).1 }
}

/// 70 rows from position 60 on, over three pages of a pool of five that was full of NaN.
fn write(isa: Isa, threads: usize, format: KvFormat, head_dim_k: usize, head_dim_v: usize) -> Written {
    let shape = KvShape { format, kv_heads: 3, head_dim_k, head_dim_v };
    let place = KvPlace { page_stride: shape.page_bytes() + 128, offset: 64, shape };
    let mut words = vec![u64::from_ne_bytes([NAN_FILL; 8]); 5 * place.page_stride / 8];
    // Rows lie in a wider buffer, heads apart from each other, and some numbers are extreme.
    let buffer = |dim: usize, salt: usize| -> Vec<f32> {
        let mut values: Vec<f32> = (0..ROWS * strides(dim).0).map(|i| number(i + salt)).collect();
        for (i, x) in EXTREMES.into_iter().enumerate() {
            values[i * 37 % (3 * dim)] = x;
        }
        // A block whose greatest number is tiny.
        values[strides(dim).0..][..dim].fill(2e-6);
        values
    };
    let (k, v) = (buffer(head_dim_k, 0), buffer(head_dim_v, 99));
    let segment = Segment { first_position: FIRST, first_row: 0, rows: ROWS, pages: &TABLE };
    let mut pool = Pool::new(PoolOptions { threads, ..PoolOptions::default() }).expect("the pool starts");
    write_segments(
        isa,
        &mut pool,
        &KvPagesMut::new(bytemuck::cast_slice_mut(&mut words), place),
        &[segment],
        rows(&k, head_dim_k),
        rows(&v, head_dim_v),
    )
    .expect("no task panics");
    let heads = |values: &[f32], dim: usize| -> Vec<f32> {
        (0..ROWS * 3).flat_map(|i| rows(values, dim).head(i / 3, i % 3, dim).to_vec()).collect()
    };
    let (k, v) = (heads(&k, head_dim_k), heads(&v, head_dim_v));
    Written { shape, place, words, k, v }
}

#[test]
fn what_is_written_reads_back_through_the_format_and_the_rest_stays_nan() {
    for format in KvFormat::ALL {
        for (head_dim_k, head_dim_v) in [(64, 64), (80, 80), (16, 128), (40, 24)] {
            let written = write(Isa::best(), 2, format, head_dim_k, head_dim_v);
            let pages = KvPages::new(bytemuck::cast_slice(&written.words), written.place);
            for (part, dim, rows) in
                [(KvPart::K, head_dim_k, &written.k), (KvPart::V, head_dim_v, &written.v)]
            {
                for position in 0..192 {
                    for head in 0..3 {
                        let mut found = vec![0.0; dim];
                        pages.read(TABLE[position / 64], part, head, position % 64, &mut found);
                        if !(FIRST..FIRST + ROWS).contains(&position) {
                            assert!(
                                found.iter().all(|x| x.is_nan()),
                                "{format} {part:?} position {position}"
                            );
                            continue;
                        }
                        let row = &rows[((position - FIRST) * 3 + head) * dim..][..dim];
                        assert_eq!(found, expected(format, row), "{format} {part:?} position {position}");
                    }
                }
                for page in [1, 3] {
                    let mut found = vec![0.0; dim];
                    pages.read(page, part, 1, 7, &mut found);
                    assert!(found.iter().all(|x| x.is_nan()));
                }
            }
        }
    }
}

#[test]
fn every_way_to_write_leaves_the_same_bytes_and_stays_within_the_layer() {
    for format in KvFormat::ALL {
        let plain = write(Isa::Scalar, 1, format, 80, 40);
        for isa in Isa::available() {
            for threads in [1, 3] {
                assert!(write(isa, threads, format, 80, 40).words == plain.words, "{format} {isa} {threads}");
            }
        }
        let (stride, bytes) = (plain.place.page_stride, plain.shape.page_bytes());
        for page in bytemuck::cast_slice::<u64, u8>(&plain.words).chunks_exact(stride) {
            assert!(page[..64].iter().chain(&page[64 + bytes..]).all(|byte| *byte == NAN_FILL));
        }
    }
}

#[test]
fn a_nan_stays_one() {
    for format in KvFormat::ALL {
        let shape = KvShape { format, kv_heads: 1, head_dim_k: 32, head_dim_v: 32 };
        let place = KvPlace { page_stride: shape.page_bytes(), offset: 0, shape };
        let mut words = vec![0_u64; place.page_stride / 8];
        let mut row = [1.0; 32];
        row[20] = f32::NAN;
        let rows = HeadRows { values: &row, row_stride: 32, head_stride: 32 };
        let segment = Segment { first_position: 3, first_row: 0, rows: 1, pages: &[0] };
        let mut pool =
            Pool::new(PoolOptions { threads: 1, ..PoolOptions::default() }).expect("the pool starts");
        let pages = KvPagesMut::new(bytemuck::cast_slice_mut(&mut words), place);
        write_segments(Isa::best(), &mut pool, &pages, &[segment], rows, rows).expect("no task panics");
        let mut found = [0.0; 32];
        KvPages::new(bytemuck::cast_slice(&words), place).read(0, KvPart::V, 0, 3, &mut found);
        assert!(found[20].is_nan(), "{format}");
        KvPages::new(bytemuck::cast_slice(&words), place).read(0, KvPart::K, 0, 4, &mut found);
        assert_eq!(found, [0.0; 32], "zeroed bytes read as zeros");
    }
}

#[test]
fn pages_have_the_bytes_of_their_numbers() {
    // 8 heads × 128 channels × 64 positions, keys and values.
    assert_eq!(page_bytes(KvFormat::F16, 8, 128, 128), 2 * 8 * 128 * 64 * 2);
    assert_eq!(page_bytes(KvFormat::F32, 8, 128, 128), 2 * 8 * 128 * 64 * 4);
    // One byte a number, two for every 32.
    assert_eq!(page_bytes(KvFormat::Q8_0, 8, 128, 128), 2 * 8 * 64 * (128 + 4 * 2));
    // Values of 24 channels take 32, keys of 40 channels take 40 (and two scales).
    assert_eq!(page_bytes(KvFormat::Q8_0, 1, 40, 24), 64 * (40 + 4) + 64 * (32 + 2));
    assert_eq!("q8_0".parse(), Ok(KvFormat::Q8_0));
    assert!("int8".parse::<KvFormat>().unwrap_err().to_string().contains("f16, f32 or q8_0"));
}

#[test]
#[should_panic(expected = "beyond the pool")]
fn a_page_outside_of_the_pool_is_refused() {
    let shape = KvShape { format: KvFormat::F16, kv_heads: 1, head_dim_k: 16, head_dim_v: 16 };
    let place = KvPlace { page_stride: shape.page_bytes(), offset: 0, shape };
    let mut words = vec![0_u64; 2 * place.page_stride / 8];
    let pages = KvPagesMut::new(bytemuck::cast_slice_mut(&mut words), place);
    let row = [0.0; 16];
    let segment = Segment { first_position: 0, first_row: 0, rows: 1, pages: &[2] };
    let mut writer = pages.take().expect("two writers");
    writer.write(Isa::best(), &segment, HeadRows { values: &row, row_stride: 16, head_stride: 16 });
}
