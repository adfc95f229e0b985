//! The pages of one pool: who holds them, which are free, which only the prefix cache keeps.
//!
//! A page is *held* by sessions, *idle* when none holds it but its content is worth keeping, or *free*. Nothing idle is
//! given away while something is free, and the idle page that was released first goes first. Numbers only: the bytes
//! are the device's.

const NIL: u32 = u32::MAX;

/// Pages `0..count` of one pool.
#[derive(Debug)]
pub(crate) struct Pages {
    /// Sessions that hold the page.
    holders: Vec<u32>,
    /// Whether the prefix cache knows the page's content.
    kept: Vec<bool>,
    free: Vec<u32>,
    /// The idle pages as a list through `before` and `after`, longest idle first.
    oldest: u32,
    newest: u32,
    before: Vec<u32>,
    after: Vec<u32>,
    idle: usize,
    /// Holders over all pages: a page that two sessions share counts twice.
    holdings: usize,
    /// The bottom entries of `free` that were poisoned.
    poisoned: usize,
    /// Pages that admitted sessions were promised and do not hold yet.
    promised: usize,
}

/// A page that changed owner; it must be set to zero before it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) page: u32,
    /// The prefix cache lost this page's content.
    pub(crate) evicted: bool,
}

impl Pages {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            holders: vec![0; count],
            kept: vec![false; count],
            free: (0..count as u32).rev().collect(),
            oldest: NIL,
            newest: NIL,
            before: vec![NIL; count],
            after: vec![NIL; count],
            idle: 0,
            holdings: 0,
            poisoned: 0,
            promised: 0,
        }
    }

    /// Pages in all.
    pub(crate) fn count(&self) -> usize {
        self.holders.len()
    }

    /// Pages that sessions hold.
    pub(crate) fn held(&self) -> usize {
        self.count() - self.free.len() - self.idle
    }

    /// Pages that only the prefix cache keeps.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    /// Pages that may be taken or promised now: free and idle ones that were not promised.
    pub(crate) fn unpromised(&self) -> usize {
        self.free.len() + self.idle - self.promised
    }

    /// The same if no page were shared: what is left for sessions that let go of pages and need others for them.
    pub(crate) fn unpromised_unshared(&self) -> usize {
        self.count() - self.holdings - self.promised
    }

    pub(crate) fn promise(&mut self, pages: usize) {
        assert!(pages <= self.unpromised(), "{pages} pages promised, {} are left", self.unpromised());
        self.promised += pages;
    }

    /// Takes back a promise that was not, or no longer is, needed.
    pub(crate) fn relieve(&mut self, pages: usize) {
        assert!(pages <= self.promised, "{pages} of {} promised pages taken back", self.promised);
        self.promised -= pages;
    }

    /// A page for one holder: a free one, or else the one that has been idle longest.
    pub(crate) fn take(&mut self) -> Option<Taken> {
        let taken = match self.free.pop() {
            Some(page) => Taken { page, evicted: false },
            None if self.idle > 0 => {
                let page = self.oldest;
                self.unlink(page);
                self.kept[page as usize] = false;
                Taken { page, evicted: true }
            }
            None => return None,
        };
        assert!(self.free.len() + self.idle >= self.promised, "a promised page was given away");
        self.holders[taken.page as usize] = 1;
        self.holdings += 1;
        self.poisoned = self.poisoned.min(self.free.len());
        Some(taken)
    }

    /// One more holder of a page that is held or idle.
    pub(crate) fn hold(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders += 1;
        self.holdings += 1;
        if *holders == 1 {
            assert!(self.kept[page as usize], "page {page} is free and can't be shared");
            self.unlink(page);
        }
    }

    /// One holder less. The last one leaves the page idle if its content is kept, free if not.
    pub(crate) fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is released but nobody holds it");
        *holders -= 1;
        self.holdings -= 1;
        if *holders > 0 {
            return;
        }
        match self.kept[page as usize] {
            true => self.append(page),
            false => self.free.push(page),
        }
    }

    /// The prefix cache knows the content of this held page from now on.
    pub(crate) fn keep(&mut self, page: u32) {
        assert!(self.is_held(page) && !self.kept[page as usize], "page {page} is not a new one");
        self.kept[page as usize] = true;
    }

    /// The prefix cache no longer knows this idle page.
    pub(crate) fn forget(&mut self, page: u32) {
        assert!(self.kept[page as usize] && !self.is_held(page), "page {page} is not idle");
        self.kept[page as usize] = false;
        self.unlink(page);
        self.free.push(page);
    }

    pub(crate) fn is_held(&self, page: u32) -> bool {
        self.holders[page as usize] > 0
    }

    /// Whether the prefix cache knows the page's content.
    pub(crate) fn is_kept(&self, page: u32) -> bool {
        self.kept[page as usize]
    }

    /// The free pages that were not poisoned since they became free; they count as poisoned now.
    pub(crate) fn take_unpoisoned(&mut self) -> &[u32] {
        let from = std::mem::replace(&mut self.poisoned, self.free.len());
        &self.free[from..]
    }

    /// Nothing is held and nothing promised.
    pub(crate) fn at_rest(&self) -> bool {
        self.held() == 0 && self.promised == 0
    }

    fn append(&mut self, page: u32) {
        self.before[page as usize] = self.newest;
        self.after[page as usize] = NIL;
        match self.newest {
            NIL => self.oldest = page,
            last => self.after[last as usize] = page,
        }
        self.newest = page;
        self.idle += 1;
    }

    fn unlink(&mut self, page: u32) {
        let (before, after) = (self.before[page as usize], self.after[page as usize]);
        match before {
            NIL => self.oldest = after,
            b => self.after[b as usize] = after,
        }
        match after {
            NIL => self.newest = before,
            a => self.before[a as usize] = before,
        }
        self.idle -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_pages_go_before_idle_ones_and_the_longest_idle_first() {
        let mut pages = Pages::new(3);
        let [a, b, c] = [(); 3].map(|()| pages.take().unwrap().page);
        assert_eq!(pages.take(), None);
        pages.keep(a);
        pages.keep(b);
        pages.release(b);
        pages.release(a);
        pages.release(c);
        assert_eq!((pages.held(), pages.idle(), pages.free.len()), (0, 2, 1));
        assert_eq!(pages.take(), Some(Taken { page: c, evicted: false }));
        pages.hold(b); // b is used again and released later than a
        pages.release(b);
        assert_eq!(pages.take(), Some(Taken { page: a, evicted: true }));
        assert_eq!(pages.take(), Some(Taken { page: b, evicted: true }));
    }

    #[test]
    fn a_shared_page_stays_until_its_last_holder_leaves() {
        let mut pages = Pages::new(1);
        let page = pages.take().unwrap().page;
        pages.hold(page);
        pages.release(page);
        assert!(pages.is_held(page));
        pages.release(page);
        assert!(pages.at_rest());
        assert_eq!(pages.free, [page]);
    }

    /// Pages come and go at random; whenever a step is about to begin, every free page holds NaN.
    #[test]
    fn every_free_page_is_poisoned_before_a_step() {
        const COUNT: u32 = 20;
        let mut pages = Pages::new(COUNT as usize);
        let mut nan = [false; COUNT as usize];
        let (mut random, mut returned) = (1_u64, 0);
        for step in 0..2000 {
            for _ in 0..3 {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                let page = (random >> 33) as u32 % COUNT;
                match random >> 60 {
                    0..6 => {
                        if let Some(taken) = pages.take() {
                            nan[taken.page as usize] = false;
                        }
                    }
                    6..9 if pages.is_held(page) && !pages.is_kept(page) => pages.keep(page),
                    9..15 if pages.is_held(page) => pages.release(page),
                    15 if pages.is_kept(page) && !pages.is_held(page) => pages.forget(page),
                    _ => {}
                }
            }
            for &page in pages.take_unpoisoned() {
                assert!(!nan[page as usize], "page {page} is filled twice");
                nan[page as usize] = true;
                returned += usize::from(step > 0);
            }
            let free = |page: u32| !pages.is_held(page) && !pages.is_kept(page);
            assert!((0..COUNT).all(|page| nan[page as usize] == free(page)), "step {step}");
        }
        assert!(returned > 100, "{returned} pages came back");
    }

    #[test]
    #[should_panic(expected = "promised page was given away")]
    fn promised_pages_are_not_given_away() {
        let mut pages = Pages::new(2);
        pages.promise(2);
        pages.take();
    }
}
