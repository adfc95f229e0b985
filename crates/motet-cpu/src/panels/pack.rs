//! From the rows of a file to panels, and one row back. Nothing is lost on the way.

use std::ops::Range;

use super::PackedShape;
use super::blocks::Parts;
use super::layout::{BLOCK, GROUP, Layout, PANEL, QuantLayout};

/// Packs the panels `panels` of a matrix whose file rows are `rows` (all of them) into `out`.
pub(super) fn pack(shape: &PackedShape, panels: Range<usize>, rows: &[u8], out: &mut [u8]) {
    for (panel, out) in panels.zip(out.chunks_exact_mut(shape.panel_bytes())) {
        let channels = shape.channels(panel..panel + 1);
        if channels.len() < PANEL {
            // The lanes without a channel: zero scales, zero codes.
            out.fill(0);
        }
        for (lane, channel) in channels.enumerate() {
            let row = &rows[channel * shape.row_bytes()..][..shape.row_bytes()];
            match shape.layout() {
                Layout::Float(2) => pack_values::<2>(row, lane, out),
                Layout::Float(_) => pack_values::<4>(row, lane, out),
                Layout::Quant(layout) => pack_blocks(shape, layout, row, lane, out),
            }
        }
    }
}

/// The inverse for one row: its bytes as they were in the file.
///
/// `block` is called with the number of each block of the file's row and its bytes.
pub(super) fn unpack_row(
    shape: &PackedShape,
    panel: &[u8],
    lane: usize,
    mut block: impl FnMut(usize, &[u8]),
) {
    match shape.layout() {
        Layout::Float(bytes) => {
            for (k, values) in panel.chunks_exact(bytes * PANEL).enumerate() {
                block(k, &values[lane * bytes..][..bytes]);
            }
        }
        Layout::Quant(layout) => {
            let mut parts = Parts::EMPTY;
            let mut bytes = [0; 256];
            let bytes = &mut bytes[..shape.format().block_bytes()];
            for (i, stream) in panel.chunks_exact(layout.super_bytes()).enumerate() {
                get_block(layout, stream, lane, &mut parts);
                parts.join(shape.format(), bytes);
                block(i, bytes);
            }
        }
    }
}

fn pack_values<const BYTES: usize>(row: &[u8], lane: usize, panel: &mut [u8]) {
    let values = row.as_chunks::<BYTES>().0;
    for (value, lanes) in values.iter().zip(panel.chunks_exact_mut(BYTES * PANEL)) {
        lanes.as_chunks_mut::<BYTES>().0[lane] = *value;
    }
}

fn pack_blocks(shape: &PackedShape, layout: QuantLayout, row: &[u8], lane: usize, panel: &mut [u8]) {
    let mut parts = Parts::EMPTY;
    let blocks = row.chunks_exact(shape.format().block_bytes());
    for (block, stream) in blocks.zip(panel.chunks_exact_mut(layout.super_bytes())) {
        parts.split(shape.format(), block);
        put_block(layout, &parts, lane, stream);
    }
}

/// Writes one channel of a super-block. All bits of the channel's bytes are overwritten.
fn put_block(layout: QuantLayout, parts: &Parts, lane: usize, stream: &mut [u8]) {
    let (d, min) = (parts.d.to_le_bytes(), parts.min.to_le_bytes());
    let (header, blocks) = stream.split_at_mut(layout.header_bytes());
    header[lane * layout.d_bytes..][..layout.d_bytes].copy_from_slice(&d[..layout.d_bytes]);
    header[layout.d_bytes * PANEL + lane * layout.min_bytes..][..layout.min_bytes]
        .copy_from_slice(&min[..layout.min_bytes]);
    for (b, block) in blocks.chunks_exact_mut(layout.block_bytes()).enumerate() {
        for (i, sub) in parts.subs[b][..layout.subs].iter().enumerate() {
            block[i * PANEL + lane] = *sub;
        }
        let groups = groups_of(&parts.codes, b);
        let (low, high) = block[layout.subs * PANEL..].split_at_mut(layout.planes.low * GROUP);
        put_plane(&groups, 0, layout.planes.low, lane, low);
        put_plane(&groups, layout.planes.low, layout.planes.high, lane, high);
    }
}

/// The inverse of [`put_block`].
fn get_block(layout: QuantLayout, stream: &[u8], lane: usize, parts: &mut Parts) {
    let (header, blocks) = stream.split_at(layout.header_bytes());
    let (mut d, mut min) = ([0; 2], [0; 2]);
    d[..layout.d_bytes].copy_from_slice(&header[lane * layout.d_bytes..][..layout.d_bytes]);
    min[..layout.min_bytes]
        .copy_from_slice(&header[layout.d_bytes * PANEL + lane * layout.min_bytes..][..layout.min_bytes]);
    (parts.d, parts.min) = (u16::from_le_bytes(d), u16::from_le_bytes(min));
    for (b, block) in blocks.chunks_exact(layout.block_bytes()).enumerate() {
        for (i, sub) in parts.subs[b][..layout.subs].iter_mut().enumerate() {
            *sub = block[i * PANEL + lane];
        }
        let mut groups = [0; 8];
        let (low, high) = block[layout.subs * PANEL..].split_at(layout.planes.low * GROUP);
        get_plane(low, 0, layout.planes.low, lane, &mut groups);
        get_plane(high, layout.planes.low, layout.planes.high, lane, &mut groups);
        for (codes, group) in parts.codes[b * BLOCK..][..BLOCK].as_chunks_mut::<4>().0.iter_mut().zip(groups)
        {
            *codes = group.to_le_bytes();
        }
    }
}

/// The codes of a block as eight groups of four.
#[inline(always)]
fn groups_of(codes: &[u8; 256], block: usize) -> [u32; 8] {
    let mut groups = [0; 8];
    for (group, codes) in groups.iter_mut().zip(codes[block * BLOCK..][..BLOCK].as_chunks::<4>().0) {
        *group = u32::from_le_bytes(*codes);
    }
    groups
}

/// Bits `from .. from + bits` of all codes into a plane.
#[inline(always)]
fn put_plane(groups: &[u32; 8], from: usize, bits: usize, lane: usize, plane: &mut [u8]) {
    match bits {
        0 => {}
        1 => put_bits::<1>(groups, from, lane, plane),
        2 => put_bits::<2>(groups, from, lane, plane),
        4 => put_bits::<4>(groups, from, lane, plane),
        8 => put_bits::<8>(groups, from, lane, plane),
        _ => unreachable!("a plane of {bits} bits"),
    }
}

/// The inverse of [`put_plane`]; adds its bits to the codes.
#[inline(always)]
fn get_plane(plane: &[u8], from: usize, bits: usize, lane: usize, groups: &mut [u32; 8]) {
    match bits {
        0 => {}
        1 => get_bits::<1>(plane, from, lane, groups),
        2 => get_bits::<2>(plane, from, lane, groups),
        4 => get_bits::<4>(plane, from, lane, groups),
        8 => get_bits::<8>(plane, from, lane, groups),
        _ => unreachable!("a plane of {bits} bits"),
    }
}

/// Vector v: groups v, v + bits, v + 2 · bits, …, from the lowest bits up.
#[inline(always)]
fn put_bits<const BITS: usize>(groups: &[u32; 8], from: usize, lane: usize, plane: &mut [u8]) {
    for (v, lanes) in plane.as_chunks_mut::<GROUP>().0[..BITS].iter_mut().enumerate() {
        let mut packed = 0;
        for i in 0..8 / BITS {
            packed |= (groups[v + i * BITS] >> from & field_mask(BITS)) << (i * BITS);
        }
        lanes.as_chunks_mut().0[lane] = packed.to_le_bytes();
    }
}

#[inline(always)]
fn get_bits<const BITS: usize>(plane: &[u8], from: usize, lane: usize, groups: &mut [u32; 8]) {
    for (v, lanes) in plane.as_chunks::<GROUP>().0[..BITS].iter().enumerate() {
        let packed = u32::from_le_bytes(lanes.as_chunks().0[lane]);
        for i in 0..8 / BITS {
            groups[v + i * BITS] |= (packed >> (i * BITS) & field_mask(BITS)) << from;
        }
    }
}

/// The low `bits` bits of each of four bytes.
const fn field_mask(bits: usize) -> u32 {
    0x0101_0101 * ((1 << bits) - 1)
}
