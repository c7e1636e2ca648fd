// Annotations for clang's thread safety analysis (-Wthread-safety, in `make check`): which lock guards a field, and
// which lock a function needs. Other compilers ignore them. The names are those of clang's documentation.
#pragma once

#if defined(__clang__)
#define HISTOSPEC_CHECKED(attribute) __attribute__((attribute))
#else
#define HISTOSPEC_CHECKED(attribute)
#endif

#define CAPABILITY(name) HISTOSPEC_CHECKED(capability(name))
#define SCOPED_CAPABILITY HISTOSPEC_CHECKED(scoped_lockable)
#define GUARDED_BY(lock) HISTOSPEC_CHECKED(guarded_by(lock))
#define REQUIRES(...) HISTOSPEC_CHECKED(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) HISTOSPEC_CHECKED(acquire_capability(__VA_ARGS__))
#define RELEASE(...) HISTOSPEC_CHECKED(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(lock) HISTOSPEC_CHECKED(assert_capability(lock))
#define NO_THREAD_SAFETY_ANALYSIS HISTOSPEC_CHECKED(no_thread_safety_analysis)
