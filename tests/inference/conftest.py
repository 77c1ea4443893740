"""This file is here so that pytest puts its folder, with what all rooms share, on the path."""
