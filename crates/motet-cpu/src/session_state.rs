//! What a stage remembers of its sessions: pages of keys and values, recurrent states, checkpoints.
//!
//! The engine says which page, slot or checkpoint; here is the memory. It is mapped at start-up and becomes resident
//! as it is first written. Nothing here knows which session owns what.

use bytemuck::{cast_slice, cast_slice_mut};
use motet_model::batch::{Slot, StateOp};
use motet_model::device::{DeviceError, KvFormat};
use motet_model::layout::StateLayout;
use motet_model::program::{Program, StateId, StateKind};

use crate::arena::Arena;
use crate::kv::{KvPages, KvPagesMut, KvPlace, KvShape, NAN_FILL};
use crate::shared_rows::RowsMut;

/// The pages of one pool: where each layer's part lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageLayout {
    /// Bytes of a page.
    pub(crate) stride: usize,
    /// Layers by state.
    pub(crate) layers: Vec<(StateId, KvPlace)>,
}

impl PageLayout {
    /// The page layouts of a stage that runs the states for which `here` is true.
    pub(crate) fn of(
        program: &Program,
        layout: &StateLayout,
        here: impl Fn(usize) -> bool,
        kv: KvFormat,
    ) -> Vec<Self> {
        let of_pool = |pool: &motet_model::layout::Pool| {
            let mut stride = 0;
            let mut layers = Vec::new();
            for &state in pool.states.iter().filter(|&&s| here(s)) {
                let StateKind::Kv { heads, key_dim, value_dim, .. } = program.states[state].kind else {
                    continue;
                };
                let shape =
                    KvShape { format: kv, kv_heads: heads, head_dim_k: key_dim, head_dim_v: value_dim };
                layers.push((StateId(state), KvPlace { page_stride: 0, offset: stride, shape }));
                stride = (stride + shape.page_bytes()).next_multiple_of(64);
            }
            layers.iter_mut().for_each(|(_, place)| place.page_stride = stride);
            PageLayout { stride, layers }
        };
        layout.pools.iter().map(of_pool).collect()
    }
}

/// A stage's part of every session's state.
#[derive(Debug)]
pub(crate) struct SessionState {
    pools: Vec<(PageLayout, Arena)>,
    /// First float of each recurrent state in a slot.
    recurrent_at: Vec<usize>,
    recurrent_floats: usize,
    slots: Arena,
    checkpoints: Arena,
}

impl SessionState {
    /// Maps the memory.
    pub(crate) fn new(
        pages: Vec<PageLayout>,
        page_counts: &[usize],
        recurrent_at: Vec<usize>,
        recurrent_floats: usize,
        sessions: usize,
        checkpoints: usize,
    ) -> Result<Self, DeviceError> {
        let map = |what, bytes: usize| {
            Arena::allocate(bytes).map_err(|source| DeviceError::Memory { what, bytes: bytes as u64, source })
        };
        let pools = pages
            .into_iter()
            .zip(page_counts)
            .map(|(layout, &count)| {
                let arena = map("pages", layout.stride * count)?;
                Ok((layout, arena))
            })
            .collect::<Result<_, DeviceError>>()?;
        let slots = map("recurrent state", 4 * recurrent_floats * sessions)?;
        let checkpoints = map("checkpoints", 4 * recurrent_floats * checkpoints)?;
        Ok(Self { pools, recurrent_at, recurrent_floats, slots, checkpoints })
    }

    fn page(&mut self, pool: usize, page: u32) -> &mut [u8] {
        let (layout, arena) = &mut self.pools[pool];
        &mut arena.bytes_mut()[page as usize * layout.stride..][..layout.stride]
    }

    fn slot(&mut self, slot: Slot) -> &mut [f32] {
        let n = self.recurrent_floats;
        &mut cast_slice_mut(self.slots.bytes_mut())[slot.0 as usize * n..][..n]
    }

    /// The first `floats` of one recurrent state of a session.
    pub(crate) fn of_slot(&self, slot: Slot, state: StateId, floats: usize) -> &[f32] {
        let at = slot.0 as usize * self.recurrent_floats + self.recurrent_at[state.0];
        &cast_slice(self.slots.bytes())[at..at + floats]
    }

    /// The same, to write.
    pub(crate) fn of_slot_mut(&mut self, slot: Slot, state: StateId, floats: usize) -> &mut [f32] {
        let at = slot.0 as usize * self.recurrent_floats + self.recurrent_at[state.0];
        &mut cast_slice_mut(self.slots.bytes_mut())[at..at + floats]
    }

    /// Makes one change of state.
    pub(crate) fn apply(&mut self, op: &StateOp) {
        let n = self.recurrent_floats;
        match *op {
            StateOp::ZeroPage { pool, page } => self.page(pool as usize, page).fill(0),
            StateOp::Clear { slot } => self.slot(slot).fill(0.0),
            StateOp::Save { slot, into } => {
                let from = &cast_slice(self.slots.bytes())[slot.0 as usize * n..][..n];
                cast_slice_mut::<u8, f32>(self.checkpoints.bytes_mut())[into.0 as usize * n..][..n]
                    .copy_from_slice(from);
            }
            StateOp::Restore { from, slot } => {
                let saved: &[f32] = &cast_slice(self.checkpoints.bytes())[from.0 as usize * n..][..n];
                cast_slice_mut::<u8, f32>(self.slots.bytes_mut())[slot.0 as usize * n..][..n]
                    .copy_from_slice(saved);
            }
        }
    }

    /// Fills a page with bytes that read as NaN.
    pub(crate) fn poison(&mut self, pool: usize, page: u32) {
        self.page(pool, page).fill(NAN_FILL);
    }

    fn place(&self, state: StateId) -> (usize, KvPlace) {
        let found = self.pools.iter().enumerate().find_map(|(p, (layout, _))| {
            layout.layers.iter().find(|(id, _)| *id == state).map(|(_, place)| (p, *place))
        });
        found.expect("a state of this stage")
    }

    /// The pool that holds a layer's keys and values.
    pub(crate) fn pool_of(&self, state: StateId) -> usize {
        self.place(state).0
    }

    /// A layer's keys and values, to read.
    pub(crate) fn pages(&self, state: StateId) -> KvPages<'_> {
        let (pool, place) = self.place(state);
        KvPages::new(self.pools[pool].1.bytes(), place)
    }

    /// A layer's keys and values, to write.
    pub(crate) fn pages_mut(&mut self, state: StateId) -> KvPagesMut<'_> {
        let (pool, place) = self.place(state);
        KvPagesMut::new(self.pools[pool].1.bytes_mut(), place)
    }

    /// One recurrent state of all sessions, to be taken apart by session and by columns.
    pub(crate) fn recurrent(&mut self, state: StateId) -> RecurrentState<'_> {
        let at = self.recurrent_at[state.0];
        RecurrentState { at, ..self.recurrent_all().0 }
    }

    /// All recurrent states of all sessions, and where in a slot each state starts.
    pub(crate) fn recurrent_all(&mut self) -> (RecurrentState<'_>, &[usize]) {
        let floats: &mut [f32] = cast_slice_mut(self.slots.bytes_mut());
        let slots = floats.len() / self.recurrent_floats.max(1);
        let all = RecurrentState {
            first: floats.as_mut_ptr(),
            at: 0,
            slot_floats: self.recurrent_floats,
            slots,
            borrow: std::marker::PhantomData,
        };
        (all, &self.recurrent_at)
    }
}

/// Exclusive access to recurrent states in all slots: one layer's, or all.
#[derive(Debug)]
pub(crate) struct RecurrentState<'a> {
    first: *mut f32,
    at: usize,
    slot_floats: usize,
    slots: usize,
    borrow: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: exclusive access to plain floats, of which `part`'s callers take disjoint parts.
unsafe impl Sync for RecurrentState<'_> {}

impl RecurrentState<'_> {
    /// `[rows, width]` floats of a slot's state, `stride` apart, from its float `from` on.
    ///
    /// # Safety
    /// No other part that is alive has a float in common with this one.
    pub(crate) unsafe fn part(
        &self,
        slot: Slot,
        from: usize,
        rows: usize,
        width: usize,
        stride: usize,
    ) -> RowsMut<'_> {
        let slot = slot.0 as usize;
        let end = self.at + from + (rows.max(1) - 1) * stride + width;
        assert!(slot < self.slots && end <= self.slot_floats, "slot {slot}, floats up to {end}");
        // SAFETY: within the slot by the assertion; disjoint from other parts by the caller's promise.
        unsafe {
            RowsMut::from_raw(self.first.add(slot * self.slot_floats + self.at + from), rows, width, stride)
        }
    }
}
