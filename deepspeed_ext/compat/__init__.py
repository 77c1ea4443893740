"""What older libraries call by other names, or in another order of arguments; over ops."""
