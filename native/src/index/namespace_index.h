// The namespace index: text of all problems of a namespace, for contexts that are missing in a problem's own history
// (in its first epoch, and for tool calls and other text that problems share).
//
// It has segments over all responses that arrive while it is small, and from then on over one of each group: siblings
// say much the same. New text waits until there is enough for a segment. Segments are merged up to half the limit, so
// that sources have few to follow. When all together are larger than the limit, the oldest go.
//
// Threads: none of its own. The engine's lock guards it; merge() runs without the lock.
#pragma once

#include <memory>
#include <vector>

#include "index/segments.h"

namespace histospec {

class NamespaceIndex {
 public:
  explicit NamespaceIndex(std::size_t max_tokens) : max_tokens_(max_tokens) {}

  // Whether `tokens` more still fit into one `part`-th of its limit.
  bool has_room(std::size_t tokens, std::size_t part) const {
    return segments_->tokens() + waiting_tokens_ + tokens <= max_tokens_ / part;
  }
  // Whether siblings of the responses that it has are welcome, too.
  bool small() const;
  // Keeps a copy of the text.
  void add(const ResponseView& response);
  // Whether enough text waits for take().
  bool ready() const;

  // Indexing that text has three parts, so that the slow one needs no lock: take() under the lock, merge() without it,
  // publish() under it. Only one thread may do so at a time.
  struct Batch {
    std::shared_ptr<const Segments> before;
    std::vector<Response> fresh;

    std::size_t tokens() const;
  };
  Batch take();
  std::shared_ptr<const Segments> merge(const Batch& batch) const;
  // Does nothing if the index was cleared or shrunk since take().
  void publish(const Batch& batch, std::shared_ptr<const Segments> merged);
  void clear();
  // Drops the oldest segment or, if there is none, the waiting text. Returns false if there was nothing to drop.
  bool shrink();

  const std::shared_ptr<const Segments>& segments() const { return segments_; }
  std::size_t bytes() const;

 private:
  const std::size_t max_tokens_;
  std::shared_ptr<const Segments> segments_ = std::make_shared<const Segments>();
  std::vector<Response> waiting_;
  std::size_t waiting_tokens_ = 0;
};

}  // namespace histospec
