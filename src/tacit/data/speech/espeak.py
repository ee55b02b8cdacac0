"""espeak-ng in a separate process: a voice and sentences on standard input, sound on standard output.

The library carries state from one sentence to the next and cannot reset it, so the same sentence sounds a
little different each time. With a fresh process for each speaker, a corpus is the same on every machine, in
any order and after any interruption. This file is therefore run by its path, and imports nothing that is slow
to load.

Input: one JSON object, {"voice", "pitch", "range", "speed", "sentences"}. Output: 32-bit numbers, first the
rate (samples a second), then for every sentence its number of samples, followed by its 16-bit samples.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys

_RETRIEVAL, _UTF8 = 1, 1
_SPEED, _PITCH, _RANGE = 1, 3, 4


def main(library: str, data: str) -> None:
    espeak = ctypes.CDLL(library)
    order = json.load(sys.stdin)
    sound = bytearray()

    def receive(samples: int | None, count: int, events: int) -> int:
        if samples and count > 0:
            sound.extend(ctypes.string_at(samples, 2 * count))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(receive)
    rate = espeak.espeak_Initialize(_RETRIEVAL, 0, data.encode() or None, 0)
    if rate <= 0:
        sys.exit(f"espeak-ng does not start with the voices in {data or 'its usual place'}")
    if hasattr(espeak, "espeak_ng_SetRandSeed"):  # since 1.52
        espeak.espeak_ng_SetRandSeed(ctypes.c_long(1))  # otherwise breath noise depends on the time
    espeak.espeak_SetSynthCallback(callback)
    if espeak.espeak_SetVoiceByName(order["voice"].encode()) != 0:
        sys.exit(f"espeak-ng has no voice {order['voice']}")
    for parameter, name in ((_SPEED, "speed"), (_PITCH, "pitch"), (_RANGE, "range")):
        espeak.espeak_SetParameter(parameter, order[name], 0)
    sys.stdout.buffer.write(struct.pack("<I", rate))
    for sentence in order["sentences"]:
        sound.clear()
        text = sentence.encode() + b"\0"
        espeak.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, 0, 0, _UTF8, None, None)
        espeak.espeak_Synchronize()
        sys.stdout.buffer.write(struct.pack("<I", len(sound) // 2) + sound)


if __name__ == "__main__":
    main(*sys.argv[1:])
