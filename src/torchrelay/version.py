# SPDX-License-Identifier: Apache-2.0
"""The version, in a place of its own so that everything may import it."""

__version__ = "0.1.0"
