"""gigagrad inside other people's programs, a file for each. Nothing here is imported by anything of ours."""
