//! Parallel regions, writing keys and values, and attention allocate nothing.

mod counting;

use std::time::Duration;

use counting::allocations;
use motet_cpu::attention::{AttentionShape, attend, scratch_floats};
use motet_cpu::isa::Isa;
use motet_cpu::kv::{HeadRows, KvFormat, KvPages, KvPagesMut, KvPlace, KvShape, Segment, write_segments};
use motet_cpu::pool::{Pool, PoolOptions};
use motet_cpu::shared_rows::RowsMut;

#[test]
fn a_step_allocates_nothing() {
    // No spinning: threads go to sleep and are woken all the time.
    let mut pool =
        Pool::new(PoolOptions { threads: 3, spin: Duration::ZERO, cores: None }).expect("the pool starts");
    let kv = KvShape { format: KvFormat::Q8_0, kv_heads: 2, head_dim_k: 64, head_dim_v: 64 };
    let shape = AttentionShape { kv, heads: 4, scale: 0.1, window: None, first: 0 };
    let place = KvPlace { page_stride: kv.page_bytes(), offset: 0, shape: kv };
    let mut words = vec![0_u64; 32 * place.page_stride / 8];
    let tables: Vec<u32> = (0..32).collect();
    let numbers = vec![0.5; 100 * 4 * 64];
    let rows = |heads: usize| HeadRows { values: &numbers, row_stride: heads * 64, head_stride: 64 };
    let mut out = vec![0.0; 100 * 4 * 64];
    let mut scratch = vec![0.0; scratch_floats(&shape, 3, 2048)];
    let mut before = 0;
    for step in 0..6 {
        // A prefill beside a late row whose splits are shared, then the late row alone.
        let segments = [
            Segment { first_position: 1500 + step, first_row: 0, rows: 1, pages: &tables },
            Segment { first_position: 0, first_row: 1, rows: 99, pages: &tables },
        ];
        let segments = &segments[..1 + step % 2];
        let bytes = bytemuck::cast_slice_mut(&mut words);
        write_segments(Isa::best(), &mut pool, &KvPagesMut::new(bytes, place), segments, rows(2), rows(2))
            .expect("no task panics");
        let pages = KvPages::new(bytemuck::cast_slice(&words), place);
        let out = RowsMut::new(&mut out, 100, 4 * 64, 4 * 64);
        attend(Isa::best(), &mut pool, &shape, &pages, segments, rows(4), out, &mut scratch)
            .expect("no task panics");
        // The standard library keeps something for each thread that waits for the first time, the one that waits for
        // this test included.
        if step == 1 {
            std::thread::sleep(Duration::from_millis(20));
            before = allocations();
        }
    }
    assert_eq!(allocations() - before, 0);
}
