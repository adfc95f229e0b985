//! Which instruction set the kernels run on: found out once, chosen by the caller, the same bits on all.
//!
//! Every kernel takes an [`Isa`]. It says how a result is computed, never what the result is.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;
use std::sync::LazyLock;

/// An instruction set that kernels are compiled for, slowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// The definition of every operation, in portable Rust. Runs everywhere.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI (and all of [`Isa::Avx2`]).
    Avx512,
}

/// Why an instruction set can't be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IsaError {
    /// No instruction set has this name.
    #[error("unknown instruction set {found:?}: expected scalar, avx2 or avx512")]
    Unknown {
        /// The name that was given.
        found: String,
    },
    /// The instruction set exists, but not in this CPU or not in this build.
    #[error(
        "the instruction set {isa} can't be used: this CPU (or a build without the feature `simd`) has only {}; \
         set MOTET_ISA to one of these or leave it out",
        names(&Isa::available())
    )]
    Unavailable {
        /// The instruction set that was asked for.
        isa: Isa,
    },
}

impl Isa {
    /// All instruction sets, slowest first.
    pub const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];

    /// The name used on the command line and in `MOTET_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// Whether this build and this CPU have it. Cheap: every kernel asks.
    #[inline]
    pub fn is_available(self) -> bool {
        static BEST: LazyLock<Isa> = LazyLock::new(|| match () {
            () if detect::avx512() => Isa::Avx512,
            () if detect::avx2() => Isa::Avx2,
            () => Isa::Scalar,
        });
        // Each has all of those before it.
        self <= *BEST
    }

    /// The instruction sets of this build and this CPU, slowest first. Never empty.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest available one.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }

    /// What the environment variable `MOTET_ISA` asks for, or the best one if it is not set.
    pub fn from_env() -> Result<Isa, IsaError> {
        match std::env::var_os("MOTET_ISA") {
            None => Ok(Isa::best()),
            Some(name) => name.to_string_lossy().parse::<Isa>()?.checked(),
        }
    }

    /// This instruction set if it is available.
    pub fn checked(self) -> Result<Isa, IsaError> {
        if self.is_available() { Ok(self) } else { Err(IsaError::Unavailable { isa: self }) }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Isa, IsaError> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| IsaError::Unknown { found: name.to_owned() })
    }
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod detect {
    pub(super) fn avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }

    pub(super) fn avx512() -> bool {
        avx2()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
    }
}

#[cfg(not(all(feature = "simd", target_arch = "x86_64")))]
mod detect {
    pub(super) fn avx2() -> bool {
        false
    }

    pub(super) fn avx512() -> bool {
        false
    }
}

/// Panics unless this thread rounds to nearest even and keeps denormal numbers, as inputs and as results.
///
/// Every compute thread calls it before its first kernel: a library in the same process may have changed the
/// floating-point environment, and then no result would have the promised bits.
pub fn assert_float_environment() {
    let half_ulp = black_box(f32::EPSILON / 2.0);
    let one = black_box(1.0f32);
    let odd = black_box(1.0 + f32::EPSILON);
    let nearest = one + half_ulp == 1.0
        && odd + half_ulp == 1.0 + 2.0 * f32::EPSILON
        && -one - half_ulp == -1.0
        && -odd - half_ulp == -1.0 - 2.0 * f32::EPSILON
        && black_box(1.0f64) + black_box(f64::EPSILON / 2.0) == 1.0;
    assert!(nearest, "this thread does not round to nearest even: reset its floating-point control register");
    let denormal = black_box(f32::from_bits(1));
    let kept = black_box(f32::MIN_POSITIVE) * black_box(0.5) == f32::from_bits(0x0040_0000)
        && denormal * black_box(8_388_608.0) == f32::MIN_POSITIVE
        && denormal != 0.0;
    assert!(
        kept,
        "this thread flushes denormal numbers to zero: reset its floating-point control register (FTZ, DAZ)"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_names_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert_eq!("sse".parse::<Isa>(), Err(IsaError::Unknown { found: "sse".into() }));
        assert!("AVX2".parse::<Isa>().is_err());
    }

    #[test]
    fn the_best_is_the_last_available_and_scalar_is_always_there() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Scalar));
        assert_eq!(available.last(), Some(&Isa::best()));
        for isa in Isa::ALL {
            assert_eq!(isa.checked().is_ok(), available.contains(&isa));
        }
        if !cfg!(all(feature = "simd", target_arch = "x86_64")) {
            assert_eq!(available, [Isa::Scalar]);
        }
    }

    #[test]
    fn a_fresh_thread_has_the_float_environment() {
        std::thread::spawn(assert_float_environment).join().unwrap();
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_changed_float_environment_is_noticed() {
        // MXCSR: default 0x1f80; FTZ is bit 15, DAZ bit 6, the rounding mode bits 13 and 14.
        for mxcsr in [0x9f80u32, 0x1fc0, 0x3f80, 0x5f80, 0x7f80] {
            let result = std::thread::spawn(move || {
                // SAFETY: sets the control register of this short-lived thread only, to a valid value.
                unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &mxcsr) };
                let caught = std::panic::catch_unwind(assert_float_environment);
                // SAFETY: back to the default, so that the rest of the thread runs as Rust expects.
                unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &0x1f80u32) };
                caught
            })
            .join()
            .unwrap();
            assert!(result.is_err(), "MXCSR {mxcsr:#x} passed");
        }
    }
}
