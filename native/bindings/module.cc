// histospec.native._core: arrays in, arrays out. The bindings check dtypes and shapes, the engine checks values. The
// bindings release the GIL around every call into the engine.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "casts.h"
#include "histospec/engine.h"

namespace py = pybind11;
using namespace py::literals;
using histospec::Engine;
using histospec::bindings::array_of;
using histospec::bindings::bytes_of;
using histospec::bindings::int_or_none;
using histospec::bindings::mask_of;
using histospec::bindings::Tokens;
using histospec::bindings::tokens_of;

namespace {

// Releases the GIL, so that a call that waits for the engine's lock does not stop all Python threads.
template <typename Call>
auto without_gil(Call call) {
  const py::gil_scoped_release release;
  return call();
}

std::string id_of(const std::optional<std::string>& problem) {
  if (problem && problem->empty()) throw py::value_error("problem: must not be empty; leave it out instead");
  return problem.value_or("");
}

// `name`, like every text that the engine returns, is a str: pybind11 would accept bytes for a std::string.
void ingest(Engine& engine, const py::str& name, py::handle prompt, const py::sequence& responses, std::int64_t epoch,
            const std::optional<py::sequence>& rewards, const std::optional<std::string>& problem,
            const std::optional<py::sequence>& generated, const std::optional<py::sequence>& seeds,
            const std::optional<py::sequence>& epochs, bool stored, bool ahead,
            const std::optional<py::sequence>& alternatives) {
  const Tokens head = tokens_of("prompt", prompt);
  const std::size_t n = py::len(responses);
  const auto require_one_each = [n](const char* field, const std::optional<py::sequence>& values) {
    if (values && py::len(*values) != n) {
      throw py::value_error(std::string(field) + ": has " + std::to_string(py::len(*values)) + " entries, must have " +
                            std::to_string(n) + " (one per response)");
    }
  };
  require_one_each("rewards", rewards);
  require_one_each("generated", generated);
  require_one_each("seeds", seeds);
  require_one_each("epochs", epochs);
  require_one_each("alternatives", alternatives);
  if (ahead && !stored)
    throw py::value_error("ahead: is True but stored is False; only stored responses can be read ahead");
  using histospec::Arrival;
  const auto arrival = ahead ? Arrival::kAhead : stored ? Arrival::kStored : Arrival::kNew;
  std::vector<Tokens> tokens;
  std::vector<histospec::bindings::Mask> masks;
  std::vector<py::object> packed;
  std::vector<histospec::ResponseView> views;
  for (std::size_t i = 0; i < n; ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    tokens.push_back(tokens_of("responses" + index, responses[i]));
    masks.push_back(generated ? mask_of("generated" + index, (*generated)[i]) : histospec::bindings::Mask());
    const auto seed = seeds ? int_or_none("seeds" + index, (*seeds)[i]) : std::nullopt;
    packed.push_back(alternatives ? py::object((*alternatives)[i]) : py::none());
    views.push_back(
        {{}, tokens.back().span(), masks.back().span(), epoch, seed, bytes_of("alternatives" + index, packed.back())});
    if (!epochs) continue;
    const auto its = int_or_none("epochs" + index, (*epochs)[i]);
    if (!its) throw py::value_error("epochs" + index + ": must be an integer, is None");
    views.back().epoch = *its;
    if (stored && i > 0 && views[i - 1].epoch > views[i].epoch) {
      throw py::value_error("epochs" + index + ": is older than the one before; give stored responses oldest first");
    }
  }
  const std::string id = id_of(problem), namespace_ = name;
  py::gil_scoped_release release;
  engine.ingest(namespace_, head.span(), views, id, arrival);
}

// An optional array: None is an empty span.
template <typename T>
histospec::bindings::Array<T> array_or_none(const char* field, const std::optional<py::object>& value) {
  return value ? array_of<T>(field, *value) : histospec::bindings::Array<T>();
}

py::tuple step(Engine& engine, py::handle sessions, py::handle new_tokens, py::handle new_offsets, int max_tokens,
               float verify_cost, const std::optional<py::object>& positions, std::optional<std::int64_t> most_tokens,
               const std::optional<py::object>& verified, const std::optional<py::object>& model_drafted,
               const std::optional<py::object>& model_accepted, bool runners_up) {
  const auto ids = array_of<std::int64_t>("sessions", sessions);
  const auto tokens = array_of<std::int32_t>("new_tokens", new_tokens);
  const auto offsets = array_of<std::int64_t>("new_offsets", new_offsets);
  const auto at = array_or_none<std::int64_t>("positions", positions);
  const auto server = array_or_none<std::int32_t>("verified", verified);
  const auto model = array_or_none<std::int32_t>("model_drafted", model_drafted);
  const auto accepted = array_or_none<std::int32_t>("model_accepted", model_accepted);
  const histospec::StepRequest request = {
      ids.span(), tokens.span(), offsets.span(), at.span(),
      max_tokens, verify_cost,   most_tokens,    {server.span(), model.span(), accepted.span()},
      runners_up};
  histospec::StepResult result;
  without_gil([&] { engine.step(request, result); });
  py::tuple drafts = py::make_tuple(histospec::bindings::to_numpy(std::move(result.tokens)),
                                    histospec::bindings::to_numpy(std::move(result.offsets)),
                                    histospec::bindings::to_numpy(std::move(result.probabilities)));
  if (most_tokens) {
    std::vector<std::uint8_t> outcomes(result.outcomes.size());
    std::ranges::transform(result.outcomes, outcomes.begin(),
                           [](auto outcome) { return static_cast<std::uint8_t>(outcome); });
    drafts = drafts + py::make_tuple(histospec::bindings::to_numpy(std::move(outcomes)));
  }
  if (!runners_up) return drafts;
  return drafts + py::make_tuple(histospec::bindings::to_numpy(std::move(result.runners_up)),
                                 histospec::bindings::to_numpy(std::move(result.runner_up_probabilities)));
}

py::tuple open_session(Engine& engine, const py::str& name, py::handle prompt,
                       const std::optional<std::string>& problem, const std::optional<py::object>& generated,
                       py::handle seed, bool position_noise) {
  const Tokens head = tokens_of("prompt", prompt);
  const Tokens tokens = generated ? tokens_of("generated", *generated) : Tokens();
  const std::string id = id_of(problem), namespace_ = name;
  const std::optional<std::int64_t> its_seed = int_or_none("seed", seed);
  const auto [session, prompt_length, known] =
      without_gil([&] { return engine.open(namespace_, head.span(), id, tokens.span(), its_seed, position_noise); });
  return py::make_tuple(session, prompt_length, known);
}

py::object open(Engine& engine, const py::str& name, py::handle prompt, const std::optional<std::string>& problem,
                const std::optional<py::object>& generated, py::handle seed, bool position_noise) {
  return open_session(engine, name, prompt, problem, generated, seed, position_noise)[0];
}

py::list history(const Engine& engine, const std::string& name, py::handle prompt,
                 const std::optional<std::string>& problem) {
  const Tokens head = tokens_of("prompt", prompt);
  const std::string id = id_of(problem);
  py::list out;
  for (auto& r : without_gil([&] { return engine.history(name, head.span(), id); }))
    out.append(py::make_tuple(histospec::bindings::to_numpy(std::move(r.tokens)), r.epoch));
  return out;
}

// Sets key by key: py::dict(...) with all keys takes three times as long, and a server may have thousands of
// namespaces.
template <std::size_t size>
py::dict by_name(const std::array<const char*, size>& names, const std::array<histospec::SourceStats, size>& counted) {
  py::dict out;
  for (std::size_t i = 0; i < size; ++i) {
    py::dict one;
    one["draft_tokens"] = counted[i].draft_tokens;
    one["accepted_tokens"] = counted[i].accepted_tokens;
    out[names[i]] = std::move(one);
  }
  return out;
}

py::dict by_name(const histospec::NamespaceStats& s) {
  py::dict out;
  for (const auto& counter : histospec::kCounted) out[counter.name] = s.*counter.number;
  for (const auto& [name, number] : histospec::kHeld) out[name] = s.*number;
  out["newest_epoch"] = s.newest_epoch;
  out["sources"] = by_name(histospec::kSourceNames, s.sources);
  out["ages"] = by_name(histospec::kAgeNames, s.ages);
  return out;
}

py::dict stats(const Engine& engine) {
  std::map<std::string, histospec::NamespaceStats> all;
  std::size_t bytes;
  {
    py::gil_scoped_release release;
    all = engine.stats();
    bytes = engine.memory_bytes();
  }
  py::dict namespaces;
  std::uint64_t sessions = 0;
  for (const auto& [name, s] : all) {
    sessions += s.sessions;
    namespaces[py::str(name)] = by_name(s);
  }
  return py::dict("namespaces"_a = namespaces, "sessions"_a = sessions, "index_bytes"_a = bytes);
}

py::dict lock_times(const Engine& engine) {
  const histospec::LockTimes times = without_gil([&] { return engine.lock_times(); });
  return py::dict("bounds"_a = histospec::kLockBounds, "counts"_a = times.counts, "seconds"_a = times.seconds,
                  "longest"_a = times.longest);
}

py::tuple shared_prompts(const Engine& engine, const py::str& name, std::size_t most) {
  const std::string namespace_ = name;
  const histospec::SharedPrompts shared = without_gil([&] { return engine.shared_prompts(namespace_, most); });
  py::dict namespaces;
  for (const auto& [other, prompts] : shared.namespaces) namespaces[py::str(other)] = prompts;
  return py::make_tuple(shared.asked, namespaces);
}

// Calls use(name, suffix, value) for each number of a namespace; those of sources and ages have a suffix.
template <typename Use>
void columns(const histospec::NamespaceStats& s, Use use) {
  const auto each = [&](const auto& names, const auto& counted) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      use(names[i], ".draft_tokens", counted[i].draft_tokens);
      use(names[i], ".accepted_tokens", counted[i].accepted_tokens);
    }
  };
  for (const auto& counter : histospec::kCounted) use(counter.name, "", s.*counter.number);
  each(histospec::kSourceNames, s.sources);
  each(histospec::kAgeNames, s.ages);
  for (const auto& [name, number] : histospec::kHeld) use(name, "", s.*number);
  use("newest_epoch", "", static_cast<std::uint64_t>(s.newest_epoch));
}

py::tuple counters(const Engine& engine) {
  std::vector<std::string> names;
  columns({},
          [&](const char* name, const char* number, std::uint64_t) { names.push_back(std::string(name) + number); });
  histospec::Counters all;
  std::vector<std::int64_t> values, dropped;
  {
    const py::gil_scoped_release release;
    all = engine.counters();
    values.reserve(all.namespaces.size() * names.size());
    const auto into = [](std::vector<std::int64_t>& row) {
      return [&row](const char*, const char*, std::uint64_t value) { row.push_back(static_cast<std::int64_t>(value)); };
    };
    for (const auto& [name, s] : all.namespaces) columns(s, into(values));
    columns(all.dropped, into(dropped));
  }
  py::list namespaces;
  for (const auto& [name, s] : all.namespaces) namespaces.append(py::str(name));
  const auto shape = std::array{all.namespaces.size(), names.size()};
  return py::make_tuple(namespaces, py::tuple(py::cast(names)),
                        histospec::bindings::to_numpy(std::move(values)).reshape(shape),
                        histospec::bindings::to_numpy(std::move(dropped)));
}

}  // namespace

constexpr histospec::EngineOptions kDefaults;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of HistoSpec.";
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const histospec::UnknownSession& e) {
      PyErr_SetString(PyExc_KeyError, e.what());
    }
  });

  const auto released = py::call_guard<py::gil_scoped_release>();
  py::list counted;
  for (const auto& [name, number, family, label, value, help] : histospec::kCounted) {
    counted.append(py::make_tuple(name, family, label, value, help));
  }
  m.attr("STEPPED") = static_cast<int>(histospec::Outcome::kStepped);
  m.attr("UNKNOWN") = static_cast<int>(histospec::Outcome::kUnknown);
  m.attr("TOO_LONG") = static_cast<int>(histospec::Outcome::kTooLong);
  m.attr("COUNTERS") = py::tuple(counted);
  m.attr("SOURCES") = py::tuple(py::cast(histospec::kSourceNames));
  m.attr("AGES") = py::tuple(py::cast(histospec::kAgeNames));

  py::class_<Engine>(m, "Engine")
      .def(py::init([](std::size_t memory_bytes, int history_epochs, int threads, std::size_t namespace_tokens,
                       std::size_t history_responses) {
             return std::make_unique<Engine>(
                 histospec::EngineOptions{memory_bytes, history_epochs, threads, namespace_tokens, history_responses});
           }),
           "memory_bytes"_a = kDefaults.memory_bytes, py::kw_only(), "history_epochs"_a = kDefaults.history_epochs,
           "threads"_a = kDefaults.threads, "namespace_tokens"_a = kDefaults.namespace_tokens,
           "history_responses"_a = kDefaults.history_responses)
      .def("ingest", &ingest, "namespace"_a, "prompt"_a, "responses"_a, "epoch"_a = 0, "rewards"_a = py::none(),
           py::kw_only(), "problem"_a = py::none(), "generated"_a = py::none(), "seeds"_a = py::none(),
           "epochs"_a = py::none(), "stored"_a = false, "ahead"_a = false, "alternatives"_a = py::none())
      .def("open", &open, "namespace"_a, "prompt"_a, py::kw_only(), "problem"_a = py::none(),
           "generated"_a = py::none(), "seed"_a = py::none(), "position_noise"_a = false)
      .def("open_session", &open_session, "namespace"_a, "prompt"_a, py::kw_only(), "problem"_a = py::none(),
           "generated"_a = py::none(), "seed"_a = py::none(), "position_noise"_a = false)
      .def("step", &step, "sessions"_a, "new_tokens"_a, "new_offsets"_a, "max_tokens"_a = 16, "verify_cost"_a = 0.05f,
           py::kw_only(), "positions"_a = py::none(), "most_tokens"_a = py::none(), "verified"_a = py::none(),
           "model_drafted"_a = py::none(), "model_accepted"_a = py::none(), "runners_up"_a = false)
      .def(
          "close",
          [](Engine& engine, histospec::SessionId session, bool commit, std::optional<std::int64_t> epoch,
             py::handle alternatives, std::optional<std::size_t> expected_length) {
            const auto packed = bytes_of("alternatives", alternatives);
            auto said = without_gil([&] { return engine.close(session, commit, epoch, packed, expected_length); });
            return said ? py::object(histospec::bindings::to_numpy(std::move(*said))) : py::none();
          },
          "session"_a, "commit"_a = true, py::kw_only(), "epoch"_a = py::none(), "alternatives"_a = py::none(),
          "expected_length"_a = py::none())
      .def(
          "lengths",
          [](const Engine& engine, py::handle sessions) {
            const auto ids = array_of<std::int64_t>("sessions", sessions);
            return histospec::bindings::to_numpy(without_gil([&] { return engine.lengths(ids.span()); }));
          },
          "sessions"_a)
      .def(
          "generated",
          [](const Engine& engine, histospec::SessionId session) {
            return histospec::bindings::to_numpy(without_gil([&] { return engine.generated(session); }));
          },
          "session"_a)
      .def("history", &history, "namespace"_a, "prompt"_a, py::kw_only(), "problem"_a = py::none())
      .def(
          "predict_length",
          [](const Engine& engine, const std::string& name, py::handle prompt, std::int64_t generated,
             const std::vector<double>& quantiles, const std::optional<std::string>& problem) {
            const Tokens head = tokens_of("prompt", prompt);
            const std::string id = id_of(problem);
            auto prediction =
                without_gil([&] { return engine.predict_length(name, head.span(), generated, quantiles, id); });
            return py::make_tuple(histospec::bindings::to_numpy(std::move(prediction.lengths)),
                                  prediction.observations);
          },
          "namespace"_a, "prompt"_a, "generated"_a = 0, "quantiles"_a = std::vector<double>{0.1, 0.5, 0.9, 0.99},
          py::kw_only(), "problem"_a = py::none())
      .def(
          "knows",
          [](const Engine& engine, const py::str& name, py::handle prompt, const std::optional<std::string>& problem) {
            const Tokens head = tokens_of("prompt", prompt);
            const std::string id = id_of(problem), namespace_ = name;
            return without_gil([&] { return engine.knows(namespace_, head.span(), id); });
          },
          "namespace"_a, "prompt"_a, py::kw_only(), "problem"_a = py::none())
      .def("shared_prompts", &shared_prompts, "namespace"_a, "most"_a = 64)
      .def(
          "estimator_state",
          [](const Engine& engine, const std::string& name) {
            return py::bytes(without_gil([&] { return engine.estimator(name); }));
          },
          "namespace"_a)
      .def(
          "restore_estimator",
          [](Engine& engine, const py::str& name, const py::bytes& state) {
            const std::string namespace_ = name;
            const std::string_view bytes = state;
            const py::gil_scoped_release release;
            engine.restore_estimator(namespace_, bytes);
          },
          "namespace"_a, "state"_a)
      .def("drop_namespace", &Engine::drop_namespace, "namespace"_a, py::kw_only(), "keep_learned"_a = false, released)
      .def("assign", &Engine::assign, "namespace"_a, "tenant"_a, released)
      .def("limit_tenant", &Engine::limit_tenant, "tenant"_a, "bytes"_a, released)
      .def("tenants", &Engine::tenants, released)
      .def("congested", &Engine::congested, released)
      .def("evicted", &Engine::evicted)
      .def("wait_until_built", &Engine::wait_until_built, released)
      .def("memory_bytes", &Engine::memory_bytes, released)
      .def("memory_budget", &Engine::memory_budget)
      .def("running_bytes", &Engine::running_bytes)
      .def("stats", &stats)
      .def("lock_times", &lock_times)
      .def("counters", &counters)
      .def("check_integrity", &Engine::check_integrity, released);
}
