"""Files as a killed process leaves them: copies, what a store of vectors holds that opens them, and bytes that change."""

import os

import numpy as np


def copy_sparse(source, target):
    """Copy a directory's files, holes as holes."""
    target.mkdir()
    for path in source.iterdir():
        copy_sparse_file(path, target / path.name)


def copy_sparse_file(source, target):
    """Copy a file, holes as holes: most of a store's file is one."""
    with source.open("rb", buffering=0) as old, target.open("wb", buffering=0) as new:
        new.truncate(os.fstat(old.fileno()).st_size)
        for at, nbytes in data_of(old):
            os.pwrite(new.fileno(), os.pread(old.fileno(), nbytes, at), at)


def data_of(file):
    """The position and length of each stretch of a file that is no hole."""
    at, size = 0, os.fstat(file.fileno()).st_size
    while at < size:
        try:
            at = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
        yield at, end - at
        at = end


def state_of(store, *names):
    """All that a store holds, and what it knows of batches."""
    vectors = {vector: (spec, store.read(vector).tobytes()) for vector, spec in store.vectors().items()}
    return vectors, [store.answer(name) for name in names], store.sessions()


def places_to_change(path, rng, count):
    """Positions in a file: half of them anywhere but in holes, half of bytes that are not 0."""
    with path.open("rb") as file:
        stretches = list(data_of(file))
        anywhere = [at + int(rng.integers(nbytes)) for at, nbytes in stretches for _ in range(count)]
        used = [
            at + int(place)
            for at, nbytes in stretches
            for place in rng.choice(nonzero(os.pread(file.fileno(), nbytes, at)), count)
        ]
    return [int(place) for found in (anywhere, used) if found for place in rng.choice(found, count // 2)]


def nonzero(data):
    """The places of bytes that are not 0, or the first."""
    places = np.flatnonzero(np.frombuffer(data, np.uint8))
    return places if len(places) else np.zeros(1, np.int64)


def change(path, place, by):
    """Change one byte of a file; again, and it is as it was."""
    with path.open("r+b", buffering=0) as file:
        file.seek(place)
        (before,) = file.read(1)
        file.seek(place)
        file.write(bytes([before ^ by]))
