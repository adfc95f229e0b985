//! One output element from the input elements at the same place.

use crate::lanes::{Lanes, dispatch};

dispatch! {
    /// `y[i] = y[i] + x[i]`. Panics if the lengths differ.
    pub fn add(y: &mut [f32], x: &[f32]) = add_on_lanes;
}

#[inline(always)]
fn add_on_lanes<L: Lanes>(l: L, y: &mut [f32], x: &[f32]) {
    assert_eq!(y.len(), x.len(), "add: as many elements on both sides");
    let (y, y_tail) = y.as_chunks_mut();
    let (x, x_tail) = x.as_chunks();
    for (y, x) in y.iter_mut().zip(x) {
        l.store(l.add(l.load(y), l.load(x)), y);
    }
    l.store_tail(l.add(l.load_tail(y_tail, 0.0), l.load_tail(x_tail, 0.0)), y_tail);
}
