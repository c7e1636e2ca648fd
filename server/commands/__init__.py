"""What people run beside a server: `histospec status`, `snapshot`, `restore`, `forget`, `bench`."""
