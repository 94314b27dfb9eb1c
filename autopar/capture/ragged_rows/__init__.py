"""Convert ops on rows that a mask selects (``x[mask]``, ``masked_select``, ``nonzero``) to fixed
shapes.

The number of selected rows depends on values, but a program has fixed shapes. Therefore the program
computes all rows, and excludes the other rows where rows are summed, averaged or written back. Each
other row is replaced by the first selected row. Thus the program only computes values that the
model also computes, and for example no logarithm of a value that the mask excludes.

If no op on the rows can fail or overflow for finite values, the other rows are replaced by zeros
instead. Samples then do not depend on each other.

The pass runs on the forward graph of torch functions. The number of rows that a mask selects is one
symbol, and only the first dim of a tensor may depend on it. All ops between the selection and the
reduction must be row-wise (`autopar.capture.ragged_rows.rowwise`). Any other op is refused, with
its source line.
"""

from autopar.capture.ragged_rows.settle import settle_rows

__all__ = ["settle_rows"]
