import numpy as np
import numpy.typing as npt

def table(
    stored: npt.NDArray[np.uint8],
    layers: int,
    pages: int,
    heads: int,
    head_page_bytes: int,
    table: npt.NDArray[np.uint64],
) -> None: ...
def gather(
    memory: npt.NDArray[np.uint8],
    row_bytes: int,
    places: npt.NDArray[np.int64],
    slot: npt.NDArray[np.uint8],
    layers: int,
    pages: int,
    heads: int,
    head_page_bytes: int,
    table: npt.NDArray[np.uint64],
) -> None: ...
def scatter(
    piece: npt.NDArray[np.uint8],
    layers: int,
    pages: int,
    heads: int,
    head_page_bytes: int,
    table: npt.NDArray[np.uint64],
    memory: npt.NDArray[np.uint8],
    row_bytes: int,
    places: npt.NDArray[np.int64],
) -> int: ...
def use_vectors(wanted: bool) -> bool: ...
