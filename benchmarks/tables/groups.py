"""What a row group's rows, its codec and its dictionaries cost: CPU time a row to decode it.

python benchmarks/tables/groups.py FOLDER
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from table import CHUNK, COLUMNS, chunk

ROUNDS = 5
CHUNKS = 10
GROUP_ROWS = (4_096, 8_192, 16_384, 32_768, 65_536)
CODECS = ("ZSTD", "LZ4", "NONE")
TEXTS = [column.name for column in COLUMNS if column.dtype == "string"]
DICTIONARIES = {
    "all columns": [column.name for column in COLUMNS],
    "no floats": [column.name for column in COLUMNS if column.dtype != "float32"],
}


def decode_ns(path: Path) -> float:
    """CPU time a row of reading every row group, page checksums verified."""
    begun_s = time.process_time()
    with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=TEXTS) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, use_threads=False)
    return (time.process_time() - begun_s) / (CHUNKS * CHUNK) * 1e9


def main() -> None:
    """Write every kind, then read them in turn."""
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    table = pa.concat_tables([chunk(number) for number in range(CHUNKS)])
    kinds = list(itertools.product(CODECS, DICTIONARIES, GROUP_ROWS))
    paths = {kind: root / f"{'-'.join(map(str, kind)).replace(' ', '_')}.parquet" for kind in kinds}
    for (codec, dictionaries, rows), path in paths.items():
        pq.write_table(
            table,
            path,
            row_group_size=rows,
            compression=codec,
            use_dictionary=DICTIONARIES[dictionaries],
            write_page_checksum=True,
            write_page_index=True,
        )
    rounds = [{kind: decode_ns(path) for kind, path in paths.items()} for _ in range(ROUNDS)]
    for kind, path in paths.items():
        cost_ns = statistics.median(costs[kind] for costs in rounds)
        codec, dictionaries, rows = kind
        sys.stdout.write(
            f"{codec:5} dictionaries: {dictionaries:12} {rows:6} rows a group: "
            f"{path.stat().st_size / 2**20:5.1f} MiB, {cost_ns:5.0f} ns a row\n"
        )


if __name__ == "__main__":
    main()
