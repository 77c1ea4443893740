"""Views of a (48, 200) tensor whose rows lie in memory in unusual ways."""

LAYOUTS = {
    "strided rows": lambda t: t[:, :96],
    "from an odd element": lambda t: t[:, 1:98],
    "every other row": lambda t: t[::2, 16:80],
    "two leading dimensions": lambda t: t.view(6, 8, 200)[:, :, :50],
    "leading dimensions that do not join": lambda t: t.view(6, 8, 200)[:, 2:5],
    "swapped": lambda t: t.view(6, 8, 200).transpose(0, 1),
    "by columns": lambda t: t.t(),
    "one row for all": lambda t: t[:1].expand(48, 200),
    "one element for all": lambda t: t[0, 0].expand(48, 200),
    "every other element": lambda t: t[:, ::2],
}
