//! Packing loses nothing: every bit of the file comes back, in parts or as a whole.

use super::*;
use crate::testing::Random;

fn random_matrix(format: Format, n_out: usize, k: usize) -> (PackedShape, Vec<u8>) {
    let shape = PackedShape::new(format, n_out, k).unwrap();
    let mut random = Random::new(n_out as u64 * 31 + k as u64);
    (shape, (0..n_out * shape.row_bytes()).map(|_| random.next() as u8).collect())
}

#[test]
fn every_bit_of_every_format_comes_back() {
    for format in Format::ALL {
        for n_out in [1, 16, 37] {
            let (shape, rows) = random_matrix(format, n_out, 512);
            let matrix = PackedMatrix::pack(shape, &rows).unwrap();
            for (row, bytes) in rows.chunks_exact(shape.row_bytes()).enumerate() {
                let mut back = vec![0; bytes.len()];
                let block_bytes = format.block_bytes();
                let panel = matrix.panels(row / PANEL..row / PANEL + 1);
                pack::unpack_row(&shape, panel, row % PANEL, |i, block| {
                    back[i * block_bytes..][..block_bytes].copy_from_slice(block);
                });
                assert!(back == bytes, "{format} row {row} of {n_out}");

                let (mut expected, mut values) = (vec![0.0; 512], vec![0.0; 512]);
                format.dequantize(bytes, &mut expected);
                matrix.dequantize_row(row, &mut values);
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&values), bits(&expected), "{format} row {row} of {n_out}");
            }
        }
    }
}

#[test]
fn parts_packed_alone_make_the_whole() {
    for format in Format::ALL {
        let (shape, rows) = random_matrix(format, 71, 256);
        assert_eq!(shape.panel_count(), 5);
        let mut whole = vec![0xaa; shape.bytes()];
        shape.pack_panels(0..5, &rows, &mut whole);
        let mut parts = vec![0x55; shape.bytes()];
        let (first, rest) = parts.split_at_mut(2 * shape.panel_bytes());
        shape.pack_panels(2..5, &rows, rest);
        shape.pack_panels(0..2, &rows, first);
        assert!(whole == parts, "{format}");
    }
}

#[test]
fn sizes_are_those_of_the_formats() {
    // Bits per weight: the file's, and one byte for a 6-bit sub-scale.
    let expected = [
        (Format::F32, 32.0),
        (Format::F16, 16.0),
        (Format::BF16, 16.0),
        (Format::Q4_0, 4.5),
        (Format::Q4_1, 5.0),
        (Format::Q5_0, 5.5),
        (Format::Q5_1, 6.0),
        (Format::Q8_0, 8.5),
        (Format::Q2K, 2.625),
        (Format::Q3K, 3.5625),
        (Format::Q4K, 4.625),
        (Format::Q5K, 5.625),
        (Format::Q6K, 6.5625),
        (Format::IQ4NL, 4.5),
        (Format::IQ4XS, 4.3125),
        (Format::MXFP4, 4.25),
    ];
    assert_eq!(expected.len(), Format::ALL.len());
    for (format, bits) in expected {
        let bytes = packed_bytes(format, 160, 4096).unwrap();
        assert_eq!(bytes as f64 * 8.0 / (160.0 * 4096.0), bits, "{format}");
    }
    assert_eq!(packed_bytes(Format::MXFP4, 16, 32), Ok(320), "272 bytes, to the next 64");
    assert_eq!(packed_bytes(Format::Q4_0, 17, 64), Ok(2 * 2 * (32 + 256)), "a panel for the last channel");
}

#[test]
fn impossible_shapes_are_refused() {
    assert_eq!(
        packed_bytes(Format::Q4K, 16, 576),
        Err(PanelError::Row { format: Format::Q4K, k: 576, expected: 256 })
    );
    assert!(matches!(packed_bytes(Format::F32, 16, 0), Err(PanelError::Row { .. })));
    assert!(matches!(packed_bytes(Format::F32, usize::MAX, 1 << 20), Err(PanelError::Size { .. })));
    assert!(matches!(packed_bytes(Format::F32, 16, usize::MAX), Err(PanelError::Size { .. })));

    let shape = PackedShape::new(Format::F32, 16, 64).unwrap();
    let arena = Arc::new(Arena::allocate(8192).unwrap());
    assert!(PackedMatrix::new(shape, arena.clone(), 8192 - shape.bytes()).is_ok());
    for offset in [32, 8192 - shape.bytes() + 64, usize::MAX - 63] {
        assert!(matches!(PackedMatrix::new(shape, arena.clone(), offset), Err(PanelError::Place { .. })));
    }
}
