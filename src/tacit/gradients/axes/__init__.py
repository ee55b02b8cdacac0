"""Which axis of a tensor counts the records, through every operation that torch itself is made of.

A tensor's *axes* is a string with one letter for each of its dimensions:

    R   rows belong to records, in order and the same number for each
    E   all rows are equal (zeros, a mask expanded over the batch): may meet the records' axis anywhere
    M   blocks of rows, one block for each record, are equal (a mask of windows repeated over the batch)
    C   rows are independent draws (the output of `torch.rand`): may become the records' axis
    P   row j holds the number j, as in `arange(len(x))`: may pick record j's own row and do nothing else
    .   anything else

`Follow` runs a torch function on tensors without data (torch's meta device) and sees each operation it is
made of. Every operation needs a rule here that says where the letters go. An operation that has none, that
selects, orders, shifts or adds up along R, or that lets R meet rows which differ by position, raises
`Unsupported`: nothing mixes records unless a rule says that it does not. How many records there are may
not become a number either, so a sum over equal rows is refused where it could count them.

>>> import torch
>>> follow(torch.Tensor.softmax, ("R..",), (torch.empty(4, 5, 6), -1), {}, records=4).outputs
['R..']
>>> shapes = torch.empty(4, 5, 6), torch.empty(6, 2)
>>> follow(torch.einsum, ("R..", ".."), ("btd,de->bte", *shapes), {}, records=4).outputs
['R..']
>>> follow(torch.mean, ("R..",), (torch.empty(4, 5, 6), 0), {}, records=4)
Traceback (most recent call last):
tacit.gradients.axes.call.Unsupported: torch.mean (aten.mean along the records)
"""

from tacit.gradients.axes.call import Unsupported, function_name, tensors_in
from tacit.gradients.axes.following import Followed, follow

__all__ = ["Followed", "Unsupported", "follow", "function_name", "tensors_in"]
