#!/usr/bin/env python3
"""The polynomials of crates/motet-cpu/src/math.rs, and the values its f64 functions are tested against.

    pip install mpmath
    python3 tools/polynomials.py             # prints the coefficients, highest power first, and their errors
    python3 tools/polynomials.py fixtures    # writes crates/motet-cpu/tests/fixtures/math_f64.txt

Each polynomial interpolates its function at Chebyshev nodes, in 60 digits; the coefficients are then rounded
to the precision in which they are used. That is within a small factor of the best polynomial of its degree.
"""

import pathlib
import random
import struct
import sys

from mpmath import atanh, cos, exp, log, log1p, lu_solve, matrix, mp, mpf, pi, polyval, power, sin, sqrt, tanh

mp.dps = 60


def f32(x):
    return struct.unpack("f", struct.pack("f", float(x)))[0]


def fit(g, low, high, degree):
    """Coefficients, highest power first."""
    nodes = [
        (low + high) / 2 + (high - low) / 2 * cos(pi * (2 * k + 1) / (2 * degree + 2)) for k in range(degree + 1)
    ]
    rows = matrix([[x**p for p in range(degree, -1, -1)] for x in nodes])
    return list(lu_solve(rows, matrix([g(x) for x in nodes])))


def show(name, g, low, high, degree, single, whole, exact):
    """`whole(x, p)` is the function with the polynomial's value p in place; its relative error is reported."""
    rounding = f32 if single else float
    coefficients = [rounding(c) for c in fit(g, mpf(low), mpf(high), degree)]
    worst = mpf(0)
    for k in range(2001):
        x = mpf(low) + (mpf(high) - mpf(low)) * k / 2000
        if exact(x) != 0:
            worst = max(worst, abs(whole(x, polyval([mpf(c) for c in coefficients], x)) / exact(x) - 1))
    print(f"// {name}: relative error 2^{float(log(worst, 2)):.1f} before rounding")
    for c in coefficients:
        print(f"    {c!r},")


def taylor(f, terms):
    """f away from 0, its Taylor polynomial where f would cancel."""
    return lambda x: f(x) if abs(x) > mpf(10) ** -8 else polyval(terms[::-1], x)


def coefficients():
    half_ln2 = log(2) / 2 + mpf("1e-4")
    exp_rest = taylor(lambda r: (exp(r) - 1 - r) / r**2, [mpf(1) / 2, mpf(1) / 6, mpf(1) / 24])
    for name, degree, single in [("exp f32", 5, True), ("exp f64", 10, False)]:
        show(name, exp_rest, -half_ln2, half_ln2, degree, single, lambda r, p: 1 + r + r * r * p, exp)

    ln_rest = taylor(lambda f: (log1p(f) - f + f * f / 2) / f**3, [mpf(1) / 3, -mpf(1) / 4, mpf(1) / 5])
    show("ln f32", ln_rest, sqrt(2) / 2 - 1, sqrt(2) - 1, 8, True, lambda f, p: f - f * f / 2 + f**3 * p, log1p)

    # ln(m) = 2 s + s z P(z), s = (m - 1) / (m + 1), z = s²
    top = ((sqrt(2) - 1) / (sqrt(2) + 1)) ** 2
    atanh_rest = taylor(lambda z: 2 * (atanh(sqrt(z)) / sqrt(z) - 1) / z, [mpf(2) / 3, mpf(2) / 5, mpf(2) / 7])
    show("ln f64", atanh_rest, 0, top, 7, False, lambda z, p: 2 + z * p, lambda z: 2 * atanh(sqrt(z)) / sqrt(z) if z else mpf(2))

    # tanh(x) = x + x z P(z), z = x², up to 0.625
    tanh_rest = taylor(lambda z: (tanh(sqrt(z)) / sqrt(z) - 1) / z, [-mpf(1) / 3, mpf(2) / 15, -mpf(17) / 315])
    show("tanh f32", tanh_rest, 0, mpf("0.625") ** 2, 4, True, lambda z, p: 1 + z * p, lambda z: tanh(sqrt(z)) / sqrt(z) if z else mpf(1))

    # sin(r) = r + r z P(z), cos(r) = 1 - z / 2 + z² P(z), z = r², up to π / 4
    top = (pi / 4 + mpf("1e-6")) ** 2
    sin_rest = taylor(lambda z: (sin(sqrt(z)) / sqrt(z) - 1) / z, [-mpf(1) / 6, mpf(1) / 120, -mpf(1) / 5040])
    show("sin f64", sin_rest, 0, top, 6, False, lambda z, p: 1 + z * p, lambda z: sin(sqrt(z)) / sqrt(z) if z else mpf(1))
    cos_rest = taylor(lambda z: (cos(sqrt(z)) - 1 + z / 2) / z**2, [mpf(1) / 24, -mpf(1) / 720, mpf(1) / 40320])
    show("cos f64", cos_rest, 0, top, 5, False, lambda z, p: 1 - z / 2 + z * z * p, lambda z: cos(sqrt(z)))

    # Constants split so that their multiples by small integers are exact.
    high = f32(0.693359375)
    print(f"// ln 2 f32: {high!r} + {f32(log(2) - mpf(high))!r}")
    scale = mpf(2) ** 32
    high = int(log(2) * scale) / scale
    print(f"// ln 2 f64: {float(high)!r} + {float(log(2) - high)!r}")
    rest, parts = pi / 2, []
    for bits in (32, 66):
        part = int(rest * mpf(2) ** bits) / mpf(2) ** bits
        parts.append(float(part))
        rest -= mpf(parts[-1])
    print(f"// π / 2 f64: {' + '.join(map(repr, parts))} + {float(rest)!r}")


def hex64(x):
    return struct.pack(">d", float(x)).hex()


def fixtures():
    """Lines of: name, argument(s), value rounded to f64, all as hexadecimal bits."""
    draw = random.Random(20261129)
    lines = ["# made by tools/polynomials.py: name, arguments, value, as bits of f64"]
    angles = [0.0, 1e-9, -1e-300, 0.5, -1.0, 1.5707963267948966, 3.141592653589793, 22.0, 355.0, 1048575.0, -5419351.0 / 8]
    angles += [draw.uniform(-4, 4) for _ in range(300)] + [draw.uniform(-(2**20), 2**20) for _ in range(500)]
    # The hardest arguments: the doubles nearest to multiples of π / 2.
    angles += [float(pi / 2 * draw.randrange(1, 660000)) for _ in range(300)]
    for x in angles:
        lines.append(f"sin {hex64(x)} {hex64(sin(mpf(x)))}")
        lines.append(f"cos {hex64(x)} {hex64(cos(mpf(x)))}")
    for x in [0.0, 1.0, -1.0, 1e-20, 88.5, -700.0, 700.0] + [draw.uniform(-700, 700) for _ in range(400)]:
        lines.append(f"exp {hex64(x)} {hex64(exp(mpf(x)))}")
    for x in [1.0, 2.0, 0.5, 5e-324, 1e308, 1.0000000000000002] + [10 ** draw.uniform(-300, 300) for _ in range(300)] + [draw.uniform(0.5, 2) for _ in range(300)]:
        lines.append(f"ln {hex64(x)} {hex64(log(mpf(x)))}")
    for _ in range(400):
        base, y = 10 ** draw.uniform(0, 8), draw.uniform(-2, 2)
        lines.append(f"pow {hex64(base)} {hex64(y)} {hex64(power(mpf(base), mpf(y)))}")
    for base in (10000.0, 500000.0, 1e6, 1e7):
        for i in range(0, 128, 2):
            lines.append(f"pow {hex64(base)} {hex64(-i / 128)} {hex64(power(mpf(base), mpf(-i / 128)))}")
    path = pathlib.Path(__file__).parent.parent / "crates/motet-cpu/tests/fixtures/math_f64.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines) - 1} values")


if __name__ == "__main__":
    fixtures() if sys.argv[1:] == ["fixtures"] else coefficients()
