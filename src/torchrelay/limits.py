# SPDX-License-Identifier: Apache-2.0
"""Bounds on everything that comes from outside, each with its unit and its reason.

They are checked before memory is spent, at the place that reads the bytes.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

MAX_ENTRY_BYTES = 2048 * MIB
"""Plain bytes of one entry. A GEMM-heavy kernel group is a few MiB; AOTInductor packages in a
`tree` reach hundreds."""

MAX_SEGMENT_BYTES = 64 * MIB
"""Plain bytes of one segment; about 60,000 records."""

MAX_DOCUMENT_BYTES = 1 * MIB
"""Bytes of one environment, stamp or policy document, and of the first line of a plain segment."""

MAX_HEADER_BYTES = 16 * MIB
"""Bytes of one batch header or checkpoint header. Parsed, a hostile one of small members takes some
eight times as much memory."""

MAX_RECORD_BYTES = 1 * MIB
"""Bytes of one record line; a `tree` entry may list thousands of files."""

MAX_RECORDS = 100_000
"""Records in one batch."""

MAX_FILES = 10_000
"""Files in one entry."""

MAX_NEEDS = 256
"""Entries that one entry may need."""

MAX_TIMES = 4096
"""Masked numbers that one entry may put back."""

MAX_NAME_CHARS = 255
"""Characters of a file name; the bound of ext4, XFS, APFS and NTFS."""

MAX_KEY_CHARS = 512
"""Characters of an entry key (`tree` keys are the longest)."""

MAX_WORKLOAD_CHARS = 200
"""Characters of a workload name, so that its object names stay below 512 characters."""

MAX_OBJECT_NAME_CHARS = 512
"""Characters of an object's name in a store; S3 and GCS take 1024, less the prefix of the URL."""

MAX_PICKLE_OPERATIONS = 1_000_000
"""Operations of one pickle that is walked: some 400 MiB while it lasts. A 4-layer transformer has 20,000."""

MAX_JSON_DEPTH = 64
"""Nesting of any JSON document that torchrelay reads."""

MAX_WINDOW_LOG = 23
"""zstd window of 8 MiB: what a reader must hold in memory beside the output."""

ZSTD_LEVEL = 3
"""8-12x on cache entries at about 300 MB/s; higher levels gain little and cost much."""
