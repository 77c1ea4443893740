// What the loops of a rule are compiled for: each activation if it has one.
struct NoOption {};

template <class Rule, class Body>
DSX_HOST_DEVICE inline void with_option(const Rule& rule, const Body& body) {
  if constexpr (requires { rule.activation; }) {
    with_activation(rule.activation, body);
  } else {
    body(NoOption{});
  }
}
