// Browsers start no workers from pages that are opened from disk. There the search runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      frame.contentDocument.body.append(script);
    }

    async postMessage(data) {
      await this.loaded;
      this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
