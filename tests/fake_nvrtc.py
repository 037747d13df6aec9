"""A library that plays NVRTC. It compiles an empty source; what it does with any other is up to the test."""

import os
import shlex
import subprocess
from pathlib import Path

TEXT = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
extern "C" {
const char* nvrtcGetErrorString(int status) { return status == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR"; }
int nvrtcVersion(int* major, int* minor) { return *major = MAJOR, *minor = MINOR, 0; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 1, 0; }
int nvrtcGetSupportedArchs(int* archs) { return *archs = 90, 0; }
int nvrtcCreateProgram(char** program, const char* text, const char*, int, char**, char**) {
    return *program = strdup(text), 0;
}
int nvrtcCompileProgram(char* program, int count, char** options) {
    if (!*program) return 0;
    BODY;
    return 6;
}
int nvrtcDestroyProgram(char** program) { return free(*program), 0; }
#define ANSWER(what, text) \
    int nvrtcGet##what##Size(char*, size_t* size) { return *size = sizeof text, 0; } \
    int nvrtcGet##what(char*, char* out) { return strcpy(out, text), 0; }
ANSWER(ProgramLog, "")
ANSWER(PTX, "// release, V13.0.1\n")
ANSWER(CUBIN, "")
}
"""


def build(path: Path, body: str = "", version: tuple[int, int] = (13, 0)) -> Path:
    """Compiles the library. body: what it does with a source before it refuses it."""
    text = TEXT.replace("BODY", body).replace("MAJOR", str(version[0])).replace("MINOR", str(version[1]))
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=text, text=True, check=True)
    return path
