"""The commands that people run besides a server: `histospec status`, `snapshot`, `restore`, `forget` and `bench`."""
