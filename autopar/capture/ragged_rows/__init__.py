"""Rows that a mask picks (``x[mask]``, ``masked_select``, ``nonzero``), and what is computed from
them.

The number of picked rows depends on values, and a program has fixed shapes. So the program computes
all rows, and leaves out the rows that were not picked when rows are summed, averaged or written
back. A row that was not picked is replaced by the first picked row, so that the program computes
nothing that the model does not compute itself, for example no logarithm of a value that the mask
excludes.

If no op on the rows can fail or overflow for any finite values, rows that were not picked are zeros
instead. No sample then depends on another one.

The pass works on the graph of torch functions, before there is a backward. One symbol of a shape
stands for the number of rows that one mask picks, and only the first dim of a tensor may have it.
All ops between the pick and the reduction must treat rows alike and apart
(`autopar.capture.ragged_rows.rowwise`). Any other op is refused, with its source line.
"""

from autopar.capture.ragged_rows.settle import settle_rows

__all__ = ["settle_rows"]
