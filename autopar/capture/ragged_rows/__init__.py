"""Rows that a mask picks: ``x[mask]``, ``masked_select``, ``nonzero``, and what is computed of
them.

How many rows there are depends on values, and a program has fixed shapes. So all rows are computed,
and what was not picked is left out where rows are added up, averaged or put back. In place of a row
that was not picked stands the first that was, so that nothing is computed that the model does not
compute itself: no logarithm of what a mask was there to leave out.

Where nothing that is computed of rows can do harm whatever they are, rows that were not picked are
zeros, so that no sample depends on others.

The pass works on the graph of torch functions, before there is a backward. One symbol of a shape
stands for the number of rows that one mask picks; only a tensor's first dim may have it. Everything
between picking and adding up has to treat rows alike and apart
(`autopar.capture.ragged_rows.rowwise`); what does not is refused, with its line.
"""

from autopar.capture.ragged_rows.settle import settle_rows

__all__ = ["settle_rows"]
